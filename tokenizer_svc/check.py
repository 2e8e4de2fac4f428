"""`millrace schema check FILE`: what of a JSON schema would be enforced; needs no service."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from contract.chat import JsonSchemaFormat
from contract.errors import MillraceError
from contract.grammar import EnforcementReport, KeywordStatus
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest, WorkerReply
from tokenizer_svc.prompt.limits import MAX_CHARACTER_BYTES
from tokenizer_svc.refusals import invalid
from tokenizer_svc.text.checkpoint import load_checkpoint, locate


def main(arguments: list[str] | None = None) -> int:
    """0 when strict mode accepts the schema, 1 when it does not, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="millrace schema check", description=__doc__)
    parser.add_argument("file", type=Path, help="a JSON schema; - reads standard input")
    parser.add_argument(
        "--model", default=str(BUNDLED_CHECKPOINT), help="checkpoint whose vocabulary is used"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    try:
        text = _text(options.file)
        checkpoint = load_checkpoint(locate(ModelConfig(path=options.model), simulated=False))
    except (OSError, MillraceError, ConfigError) as error:
        print(f"millrace schema check: {error}", file=sys.stderr)
        return 2
    backend = Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids)
    strict, lenient = (_build(text, backend, strict=each) for each in (True, False))
    if options.json:
        print(json.dumps(_as_json(strict, lenient), indent=2, ensure_ascii=False))
    else:
        _print(strict, lenient)
    return 0 if strict.built is not None else 1


def _text(path: Path) -> str:
    """What the file, or standard input, holds; raises MillraceError for what no request could carry."""
    most = PromptLimitsConfig().max_grammar_bytes
    with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
        data = file.read(MAX_CHARACTER_BYTES * most + 1)
    too_large = invalid(f"{path} has more than {most} characters, the limit of the service", "file")
    if len(data) > MAX_CHARACTER_BYTES * most:
        raise too_large
    try:
        # Editors mark UTF-8 with bytes that are no JSON.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(f"{path} is not UTF-8 ({error}); save it as UTF-8", "file") from error
    if len(text) > most:
        raise too_large
    return text


def _build(text: str, backend: Backend, *, strict: bool) -> WorkerReply:
    request = GrammarRequest(response_format=JsonSchemaFormat(text, strict=strict))
    return build(request, backend, PromptLimitsConfig())


def _as_json(strict: WorkerReply, lenient: WorkerReply) -> dict[str, object]:
    built = strict.built or lenient.built
    report = (built.enforcement if built is not None else None) or EnforcementReport()

    def listed(statuses: tuple[KeywordStatus, ...]) -> list[dict[str, str]]:
        return [{"keyword": each.keyword, "path": each.path, "note": each.note} for each in statuses]

    return {
        "accepted_strict": strict.built is not None,
        "accepted": lenient.built is not None,
        "refusal": strict.refused.message if strict.refused is not None else "",
        "compile_ms": round(built.compile_s * 1e3, 3) if built is not None else None,
        "enforced": listed(report.enforced),
        "approximated": listed(report.approximated),
        "unenforced": listed(report.unenforced),
    }


def _print(strict: WorkerReply, lenient: WorkerReply) -> None:
    built = strict.built or lenient.built
    if strict.built is not None:
        print(f"strict: accepted ({strict.built.compile_s * 1e3:.1f} ms)")
    else:
        assert strict.refused is not None
        print(f"strict: refused: {strict.refused.message}")
        if lenient.built is not None:
            print("not strict: accepted; validate the answer for what is not enforced")
        elif lenient.refused is not None:
            print(f"not strict: refused: {lenient.refused.message}")
    if built is None or built.enforcement is None:
        return
    for title in ("enforced", "approximated", "unenforced"):
        statuses: tuple[KeywordStatus, ...] = getattr(built.enforcement, title)
        for status in statuses:
            print(
                f"{title:>12}  {status.keyword:<22} {status.path}{'  ' + status.note if status.note else ''}"
            )


if __name__ == "__main__":
    sys.exit(main())
