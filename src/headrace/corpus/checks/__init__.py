"""What is looked for inside a text: mentions of the future, language, page furniture."""
