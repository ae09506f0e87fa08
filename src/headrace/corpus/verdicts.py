"""The checks of a vintage: value, limit, status, counts and examples, in words.

A check warns or fails as the configuration says. What is measured is counted by the passes;
here it is only weighed.
"""

from __future__ import annotations

import math
from datetime import UTC, date
from typing import TYPE_CHECKING, Any

from headrace.corpus.instants import DAY_US, end_of_day
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.corpus.config import CorpusConfig

PASSED, WARNED, FAILED, NOTED = "passed", "warned", "failed", "noted"


def _check(
    name: str,
    value: float,
    limit: float | None,
    action: str,
    message: str,
    *,
    counts: Mapping[str, Any],
    examples: Sequence[Any] = (),
) -> dict[str, Any]:
    status = PASSED
    if limit is None or action == "off":
        status = NOTED
    elif value > limit:
        status = FAILED if action == "fail" else WARNED
    return {
        "name": name,
        "status": status,
        "value": round(value, 6),
        "limit": limit,
        "action": action,
        "message": message,
        "counts": dict(counts),
        "examples": list(examples),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def judge(config: CorpusConfig, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All checks of one vintage from its counted facts."""
    checks, counts = config.checks, facts["counts"]
    documents = counts["documents"]
    result = [_bad_input(facts)]
    mentions = facts["mentions"]
    share = _share(mentions["num_sure"], documents)
    result.append(
        _check(
            "future_mentions",
            share,
            checks.future_mentions.max_share,
            checks.future_mentions.action,
            f"{mentions['num_sure']:,} of {documents:,} documents ({share:.2%}) speak in their "
            "text of a year, date or name from after the cutoff as of something known; "
            f"{mentions['num_documents']:,} name one at all, be it in a notice or as an outlook",
            counts={"kinds": mentions["kinds"], "years": mentions["years"]},
            examples=mentions["examples"],
        )
    )
    duplicates = facts["duplicates"]
    sound = documents + counts["not_sampled"] + duplicates["exact"] + duplicates["near"]
    share = _share(duplicates["near"], sound)
    result.append(
        _check(
            "near_duplicates",
            share,
            checks.near_duplicates.max_share,
            checks.near_duplicates.action,
            f"{duplicates['near']:,} near-duplicates and {duplicates['exact']:,} exact ones left "
            f"out, the earliest kept; {duplicates['across']:,} documents from after the cutoff "
            "repeat one from before it",
            counts={k: v for k, v in duplicates.items() if k != "examples"},
            examples=duplicates["examples"],
        )
    )
    result += _filters(config, facts, documents)
    result.append(_concentration(config, facts))
    revisions = facts["revisions"]
    share = _share(revisions["later_versions"], documents)
    result.append(
        _check(
            "revisions",
            share,
            checks.revisions.max_share,
            checks.revisions.action,
            f"{revisions['later_versions']:,} documents are later versions of "
            f"{revisions['revised']:,} others, each available from its own date"
            if revisions["later_versions"]
            else "no document is known to be a later version of another",
            counts={k: v for k, v in revisions.items() if k != "examples"},
            examples=revisions["examples"],
        )
    )
    share = _share(counts["upper_bound"], documents)
    result.append(
        _check(
            "upper_bounds",
            share,
            checks.upper_bounds.max_share,
            checks.upper_bounds.action,
            f"{counts['upper_bound']:,} of {documents:,} documents are dated by a crawl time: "
            "available no later, perhaps much earlier"
            if counts["upper_bound"]
            else "no document is dated by a crawl time",
            counts={"upper_bound": counts["upper_bound"], "rules": facts["rules"]},
        )
    )
    if facts["tokenizer"] is not None:
        result.append(_budget(config, facts))
        given = config.tokenizer.knowledge_cutoff if config.tokenizer is not None else None
        counts = {"vocab_size": facts["tokenizer"]["vocab_size"]}
        origin = facts["tokenizer"]["origin"]
        result.append(_vintage("tokenizer_vintage", origin, given, facts["cutoff_us"], counts))
    model = config.base_model
    words = (
        "no base_model is named: a model that starts from random weights knows nothing but this "
        "corpus; training another one further cannot take out what it knows"
        if model is None
        else f"{model.name}: training it further on this corpus cannot take out what it knows"
    )
    known = None if model is None else model.knowledge_cutoff
    result.append(_vintage("base_model_vintage", words, known, facts["cutoff_us"], {}))
    return result


def _vintage(
    name: str, words: str, known: date | None, cutoff_us: int, counts: Mapping[str, Any]
) -> dict[str, Any]:
    """What else brings knowledge into a model: noted, and a warning where it is later."""
    if known is None:
        return _check(name, 0.0, None, "off", words, counts=counts)
    days = max(0, (end_of_day(known, UTC) - cutoff_us) / DAY_US)
    late = f", {days:.0f} days after the cutoff" if days else ", not after the cutoff"
    return _check(name, days, 0.0, "warn", f"{words}; known to {known}{late}", counts=counts)


def _bad_input(facts: Mapping[str, Any]) -> dict[str, Any]:
    shares = {name: source["bad_share"] for name, source in facts["sources"].items()}
    worst = max(shares, key=lambda name: (shares[name], name))
    bad = sum(source["bad"] for source in facts["sources"].values())
    return _check(
        "bad_input",
        shares[worst],
        facts["sources"][worst]["max_bad_share"],
        "fail",
        f"{bad:,} records were damaged, undated or had a wrong clock; the largest share is that of "
        f"{worst} ({shares[worst]:.2%})",
        counts={name: source["bad_reasons"] for name, source in facts["sources"].items()},
        examples=facts["bad_examples"],
    )


def _filters(
    config: CorpusConfig, facts: Mapping[str, Any], documents: int
) -> list[dict[str, Any]]:
    reasons = facts["counts"]["filtered"]
    seen = documents + sum(reasons.values()) + facts["counts"]["not_sampled"]

    def check(name: str, filtered: int, detail: str, counts: Mapping[str, Any]) -> dict[str, Any]:
        settings = getattr(config.checks, name)
        share = _share(filtered, seen)
        return _check(name, share, settings.max_share, settings.action, detail, counts=counts)

    length = reasons.get("too_short", 0) + reasons.get("over_length", 0)
    chars = facts["chars"]
    languages = facts["languages"]
    other = reasons.get("language", 0)
    most = max(languages, key=lambda name: (languages[name], name)) if languages else "none"
    dropped = reasons.get("boilerplate", 0)
    halves = sum(n for tenth, n in facts["boilerplate_tenths"].items() if int(tenth) >= 5)
    return [
        check(
            "length",
            length,
            f"{length:,} documents filtered by their length; those kept have {chars['shortest']:,} "
            f"to {chars['longest']:,} characters, {chars['mean']:,.0f} on average",
            {**chars, **{k: reasons.get(k, 0) for k in ("too_short", "over_length")}},
        ),
        check(
            "languages",
            other,
            f"{other:,} documents filtered by language; of those kept "
            f"{languages.get(most, 0):,} are '{most}', {languages.get('und', 0):,} have too few "
            "plain words to tell",
            languages,
        ),
        check(
            "boilerplate",
            dropped,
            f"{dropped:,} documents filtered as mostly menus, notices and repeated lines; of those "
            f"kept {halves:,} are half or more of that",
            facts["boilerplate_tenths"],
        ),
    ]


def _concentration(config: CorpusConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """How spread the corpus is: the largest month, the largest source, the effective months."""
    settings = config.checks.concentration
    has_tokens = facts["tokenizer"] is not None
    field = "tokens" if has_tokens else "bytes"
    months: dict[str, int] = {}
    sources: dict[str, int] = {}
    for row in facts["histogram"]:
        months[row["month"]] = months.get(row["month"], 0) + row[field]
        sources[row["source"]] = sources.get(row["source"], 0) + row[field]
    total = sum(months.values())
    month, month_share = _largest(months, total)
    source, source_share = _largest(sources, total)
    effective = (
        math.exp(-sum(n / total * math.log(n / total) for n in months.values() if n > 0))
        if total
        else 0.0
    )
    over_month = month_share > settings.max_month_share
    over_source = source_share > settings.max_source_share
    value, limit = (
        (source_share, settings.max_source_share)
        if over_source and not over_month
        else (month_share, settings.max_month_share)
    )
    return _check(
        "concentration",
        value,
        limit,
        settings.action,
        f"the largest month is {month} with {month_share:.1%} of the {field}, the largest "
        f"source {source} with {source_share:.1%}; the {len(months)} months are "
        f"filled as evenly as {effective:.1f} equal ones",
        counts={
            "months": len(months),
            "effective_months": round(effective, 2),
            "largest_month": month,
            "largest_month_share": round(month_share, 6),
            "largest_source": source,
            "largest_source_share": round(source_share, 6),
        },
    )


def _largest(parts: Mapping[str, int], total: int) -> tuple[str, float]:
    if not parts:
        return "none", 0.0
    name = max(parts, key=lambda key: (parts[key], key))
    return name, _share(parts[name], total)


def _budget(config: CorpusConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    budget, tokens = config.sampling.max_tokens, facts["counts"]["tokens"]
    if budget is None:
        return _check(
            "token_budget",
            0.0,
            None,
            "off",
            f"no budget; {tokens:,} tokens",
            counts={"tokens": tokens},
        )
    missing = max(0.0, 1 - _share(tokens, budget))
    return _check(
        "token_budget",
        missing,
        0.05,
        "warn",
        f"{tokens:,} tokens of a budget of {budget:,}, spread by {config.sampling.spread}",
        counts={"tokens": tokens, "budget": budget, **facts["budget"]},
    )


def refuse_failed(
    vintages: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], listing: str
) -> None:
    """Fail the build when a check that may fail it did.

    Raises:
        DataError: naming checks, values and limits.
    """
    lines = [
        f"vintage {name}: check {check['name']} is {check['value']:.4g}, "
        f"limit {check['limit']:.4g}: {check['message']}"
        for name, checks in vintages
        for check in checks
        if check["status"] == FAILED
    ]
    if lines:
        raise DataError(
            "\n    ".join(lines),
            remedy=(
                f"see {listing}; mend the sources, raise the check's max_share, "
                "or set its action to warn"
            ),
        )
