"""The whole product on small real data: sources of dated text and prices, and the steps."""
