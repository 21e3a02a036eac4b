"""Training programs of other projects, as they are and under ``python -m nt_attention run``.

    python benchmarks/unedited_programs.py [--sources FOLDER] [--only run_ner dpo] [--rounds 2]

FOLDER has checkouts of the repositories ``transformers``, ``sentence-transformers`` and ``evaluate``. TRL's programs
are in its wheel. The programs need ``evaluate``, ``seqeval``, ``rouge_score`` and ``nltk``. Nothing is downloaded:
models (4 layers, 128 wide, random weights, no dropout) and data (Python's documentation) are made in a temporary
folder, under the names that the programs load. Other training programs of sentence-transformers than the one here ask
for float16 or bfloat16 on a GPU.

Both runs of a program have the same seed. Times are CPU seconds of ``Trainer.train``, the smallest of all rounds: other
programs on the machine change them less than wall-clock times. The start of the process and the check of a model
are not part of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = 1500
TRAINED, TESTED = 192, 64  # rows of data
EXAMPLES = "transformers/examples/pytorch"
SENTENCES = "sentence-transformers/examples"

# Writes what `Trainer` logs, and the CPU seconds of its `train`. Python imports it before the program starts.
RECORDER = """
import atexit, importlib.util, json, os, sys, time

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), record(module.Trainer))
        return spec

def record(trainer_class):
    train = trainer_class.train
    def timed(trainer, *args, **kwargs):
        before = time.process_time()
        result = train(trainer, *args, **kwargs)
        seconds = time.process_time() - before
        atexit.register(lambda: json.dump([seconds, trainer.state.log_history], open(os.environ["RECORD"], "w")))
        return result
    trainer_class.train = timed

if "RECORD" in os.environ:
    sys.meta_path.insert(0, Finder())
"""


@dataclass
class Program:
    """A program: its file in FOLDER or its module, its model, and its arguments."""

    program: str
    model: str
    arguments: str = ""
    note: str = ""


COMMON = "--use_cpu --max_steps 8 --logging_steps 1 --report_to none --save_strategy no --per_device_train_batch_size 8"
EXAMPLE = f"{COMMON} --do_train --do_eval"
FILES = "--train_file data/{0}/train.{1} --validation_file data/{0}/validation.{1}"
TRL = f"{COMMON} --bf16 false"
PROGRAMS = {
    "run_classification": Program(
        f"{EXAMPLES}/text-classification/run_classification.py", "bert", f"{EXAMPLE} {FILES.format('topics', 'json')}"
    ),
    "run_ner": Program(
        f"{EXAMPLES}/token-classification/run_ner.py", "distilbert", f"{EXAMPLE} {FILES.format('names', 'json')}"
    ),
    "run_qa": Program(
        f"{EXAMPLES}/question-answering/run_qa.py", "electra",
        f"{EXAMPLE} {FILES.format('questions', 'json')} --max_seq_length 256",
        "the padded loss includes padding",
    ),
    "run_summarization": Program(
        f"{EXAMPLES}/summarization/run_summarization.py", "t5",
        f"{EXAMPLE} {FILES.format('summaries', 'json')} --predict_with_generate --max_source_length 256 "
        "--max_target_length 24",
    ),
    "run_clm": Program(
        f"{EXAMPLES}/language-modeling/run_clm.py", "gpt2",
        f"{EXAMPLE} {FILES.format('lines', 'txt')} --block_size 128", "it cuts the text into blocks: no padding",
    ),
    "run_mlm": Program(
        f"{EXAMPLES}/language-modeling/run_mlm.py", "modernbert",
        f"{EXAMPLE} {FILES.format('lines', 'txt')} --line_by_line --max_seq_length 256",
    ),
    "sft": Program("trl.scripts.sft", "llama", f"{TRL} --dataset_name data/texts --eval_strategy steps --eval_steps 8"),
    "dpo": Program("trl.scripts.dpo", "qwen3", f"{TRL} --dataset_name data/pairs --max_length 256"),
    "reward": Program("trl.scripts.reward", "qwen2", f"{TRL} --dataset_name data/pairs --max_length 256"),
    "grpo": Program(
        "trl.scripts.grpo", "qwen3",
        f"{TRL} --dataset_name data/prompts --reward_funcs rewards.letters --num_generations 4 "
        "--max_completion_length 24 --beta 0.1",
    ),
    "training_batch_hard_trec": Program(
        f"{SENTENCES}/sentence_transformer/training/other/training_batch_hard_trec.py",
        "sentence-transformers/all-distilroberta-v1",
    ),
}  # fmt: skip

TYPES: dict[str, Any] = {
    "t5": AutoModelForSeq2SeqLM, **dict.fromkeys(("gpt2", "llama", "qwen2", "qwen3"), AutoModelForCausalLM)
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 514, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "dropout_rate",
              "resid_pdrop", "embd_pdrop", "attn_pdrop", "seq_classif_dropout", "qa_dropout", "embedding_dropout",
              "mlp_dropout", "classifier_dropout", "summary_first_dropout")  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "t5": {"d_ff": 256, "num_decoder_layers": 4, "d_kv": 32, "decoder_start_token_id": 0},
    "distilbert": {"hidden_dim": 512},
    "electra": {"embedding_size": 128, "intermediate_size": 512},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "modernbert": {"cls_token_id": 2, "sep_token_id": 3, "intermediate_size": 256},
}


def paragraphs() -> list[tuple[int, str]]:
    """Paragraphs, with the number of their topic: two words to a hundred."""
    pieces = [(number, " ".join(piece.split()[:100])) for number, text in enumerate(topics.values())
              for piece in text.split("\n\n")]  # fmt: skip
    return [(number % 6, text) for number, text in pieces if len(text.split()) > 2 and text.isascii()][::2]


def word_pieces() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
    words.train_from_iterator(sorted(topics.values()), trainer)
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[SEP]", bos_token="[CLS]", model_max_length=256, **names,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def write_model(folder: Path, words: PreTrainedTokenizerFast) -> None:
    kind = "roberta" if "roberta" in folder.name else folder.name
    config = AutoConfig.for_model(kind, **SIZES | {"intermediate_size": 512} | OWN_SIZES.get(kind, {}))
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    TYPES.get(kind, AutoModel).from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


def question(number: int, text: str) -> dict[str, Any]:
    words = text.split()
    at = number % (len(words) - 2)
    answer = {"text": [words[at + 1]], "answer_start": [len(" ".join(words[: at + 1])) + 1]}
    return {"id": str(number), "question": f"What is next to {words[at]}?", "context": text, "answers": answer}


def entity(word: str) -> str:
    return "B-NAME" if word[0].isupper() else "B-CODE" if not word.isalpha() else "O"


ROWS: dict[str, Callable[[int, int, str, str], dict[str, Any]]] = {  # row, topic, text, the text of another row
    "topics": lambda row, topic, text, other: {"sentence": text, "label": topic},
    "names": lambda row, topic, text, other: {
        "tokens": text.split(), "ner_tags": [entity(word) for word in text.split()]
    },
    "questions": lambda row, topic, text, other: question(row, text),
    "summaries": lambda row, topic, text, other: {"text": text, "summary": " ".join(text.split()[:12])},
    "texts": lambda row, topic, text, other: {"text": text},
    "pairs": lambda row, topic, text, other: {"prompt": text[:60], "chosen": text[60:] + ".", "rejected": other},
    "prompts": lambda row, topic, text, other: {"prompt": text[:90]},
    "omkar334/trec": lambda row, topic, text, other: {"text": text, "coarse_label": topic, "fine_label": topic},
}  # fmt: skip


def write_data(root: Path) -> None:
    texts = paragraphs()
    for name, row_of in ROWS.items():
        folder = root / name if "/" in name else root / "data" / name
        folder.mkdir(parents=True)
        rows = [row_of(n, *texts[n], texts[-n - 1][1]) for n in range(len(texts))]
        trained = TRAINED + 500 * ("trec" in name)  # that program takes 500 rows for its evaluation
        parts = {"train": rows[:trained], "validation": rows[trained:][:TESTED], "test": rows[trained:][-TESTED:]}
        for part, some in parts.items():
            text = "".join(json.dumps(row) + "\n" for row in some)
            is_whole = name == "questions"  # in the form of SQuAD
            (folder / f"{part}.json").write_text(json.dumps({"data": some}) if is_whole else text)
    for part in ("train", "validation"):
        lines = (root / "data" / "texts" / f"{part}.json").read_text().splitlines()
        (root / "data" / "lines").mkdir(exist_ok=True)
        (root / "data" / "lines" / f"{part}.txt").write_text("\n".join(json.loads(row)["text"] for row in lines))
    reward = "def letters(completions, **_):\n    return [len(set(text)) / 20 for text in completions]\n"
    (root / "rewards.py").write_text(reward)


def write_sentence_splitter(folder: Path) -> None:
    """What ``run_summarization.py`` would download: nltk's sentence tokenizer, here one without abbreviations."""
    (folder / "punkt").mkdir(parents=True)
    (folder / "punkt_tab" / "english").mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / "punkt_tab" / "english" / name).touch()


@dataclass
class Result:
    """What a run of a program left."""

    seconds: float
    logs: list[dict[str, Any]]
    summary: str


def run(name: str, is_patched: bool, root: Path, sources: Path) -> Result:
    program = PROGRAMS[name]
    is_module = not program.program.endswith(".py")
    target = ["-m", program.program] if is_module else [str(sources / program.program)]
    output = f"--model_name_or_path {program.model} --output_dir out/{name}" if program.arguments else ""
    command = [sys.executable, "-W", "ignore", *(["-m", "nt_attention", "run"] if is_patched else []), *target]
    record = root / "record.json"
    record.unlink(missing_ok=True)
    path = os.pathsep.join([str(root / "recorder"), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path, "RECORD": str(record), "HF_HOME": str(root / "cache"), "HF_HUB_OFFLINE": "1",
        "NLTK_DATA": str(root / "nltk"), "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, *program.arguments.split(), *output.split()],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode or not record.exists():
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{name}: status {done.returncode}")
    seconds, logs = json.loads(record.read_text())
    return Result(seconds, logs, done.stderr.rpartition("nt_attention.patch_all:")[2])


TIMES = re.compile("runtime|per_second|flos|time|epoch")


def compare(before: Result, after: Result) -> tuple[int, float, int, float]:
    """The number of losses of steps and their largest difference; the number of metrics and their largest, relative."""
    losses, metrics = [], []
    assert [set(entry) for entry in before.logs] == [set(entry) for entry in after.logs]
    for one, other in zip(before.logs, after.logs, strict=True):
        for name, value in one.items():
            if name == "loss":
                losses.append(abs(value - other[name]))
            elif isinstance(value, (int, float)) and not TIMES.search(name):
                metrics.append(abs(value - other[name]) / max(abs(value), 1e-2))
    return len(losses), max(losses), len(metrics), max(metrics)


def row_of(name: str, root: Path, options: argparse.Namespace) -> str:
    """A row of the table."""
    rounds = [[run(name, patched, root, options.sources) for patched in (False, True)] for _ in range(options.rounds)]
    before, after = rounds[0]
    steps, loss, count, metric = compare(before, after)
    calls = [(int(n), text) for n, text in re.findall(r"(\d+) calls? (.*)", after.summary)]
    packed = sum(n for n, text in calls if text.startswith("ran packed"))
    sizes = re.findall(r"(\d+) tokens in (\d+) positions", after.summary)
    tokens, positions = (sum(int(pair[i]) for pair in sizes) for i in range(2))
    reasons = [f"{n}: {text.partition(': ')[2]}" for n, text in calls if not text.startswith("ran packed")]
    reasons += re.findall(r"not patched: (.*)", after.summary)
    times = [min(result.seconds for result in way) for way in zip(*rounds, strict=True)]
    print(name, after.summary, times, file=sys.stderr, flush=True)
    return (
        f"| `{name}` | {PROGRAMS[name].model.rpartition('/')[2]} | {steps} | {loss:.0e} | {count} | {metric:.0e} | "
        f"{packed} of {sum(n for n, _ in calls)} | {positions / tokens if tokens else 1:.2f} | "
        f"{times[0] / times[1]:.2f} × | {'; '.join([*filter(None, [PROGRAMS[name].note]), *reasons])} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="the folder of the checkouts")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    options.sources = options.sources.absolute()
    import trl

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}.\n")
    columns = "program | model | logged losses | largest difference | metrics | largest relative difference"
    columns += " | packed calls | pad ratio | time ratio | notes"
    print(f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_data(root)
        words = word_pieces()
        for name in {PROGRAMS[name].model for name in options.only}:
            write_model(root / name, words)
        for metric in (options.sources / "evaluate" / "metrics").glob("*"):
            (root / metric.name).symlink_to(metric)
        (root / "recorder").mkdir()
        (root / "recorder" / "sitecustomize.py").write_text(RECORDER)
        write_sentence_splitter(root / "nltk" / "tokenizers")
        for name in options.only:
            print(row_of(name, root, options), flush=True)


if __name__ == "__main__":
    main()
