"""What an evaluation leaves out."""

from pathlib import Path
from types import SimpleNamespace

from tests.support.runs import config_of_lines
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer
from torchtitan_cp.training.evaluator import Evaluator


def test_retrieval_is_left_out_where_the_template_takes_no_question(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    lines = ["[tokenizer]", 'kind = "bytes"', "[data]", 'source = "python-docstrings"']
    config = config_of_lines(tmp_path, *lines, f'chat_template = "{tmp_path / "own.jinja"}"')
    stage = SimpleNamespace(cp=1, tp=1, seq_len=64)
    pipeline = SimpleNamespace(
        config=config,
        corpus=SimpleNamespace(tokenizer=ByteTokenizer()),
        filler=None,
        held_out={"corpus": None},
        stage_data=lambda _: SimpleNamespace(mixture={"corpus": 1.0}),
    )
    evaluator = Evaluator(SimpleNamespace(device="cpu"), pipeline, (stage,), None, None)  # type: ignore[arg-type]
    assert evaluator.measure_retrieval(stage, None) == {}  # type: ignore[arg-type]
    [left_out] = evaluator.time.left_out
    assert left_out.startswith("retrieval: the chat template does not take these messages (of user): template error:")
