//! `generate` with several prompts, and with prompts of chats.

use serde_json::{Value, json};

use crate::command::{Folder, Run};
use crate::hugging_face::{TOKENIZER, folders};

const PROMPTS: [&str; 5] = [
    "the cat sat",
    "a",
    "they do it there in the hat",
    "cat",
    "be fn do",
];

/// Models of at most 16 tokens, with a tokenizer each.
fn models() -> Folder {
    let folder = folders();
    for name in ["llama", "gpt2"] {
        folder.write(&format!("{name}/tokenizer.json"), TOKENIZER);
    }
    folder.write("prompts.txt", PROMPTS.join("\n"));
    folder
}

fn ok(folder: &Folder, arguments: &str, more: &[&str]) -> Run {
    let mut command = folder.command(arguments);
    let run = Run::of(command.args(more).output().expect("the command starts"));
    assert_eq!(run.code, 0, "{arguments} {more:?}: {}", run.stderr);
    run
}

/// Returns the lines that `--json` prints.
fn lines(run: &Run) -> Vec<Value> {
    let lines = run.stdout.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[test]
fn the_name_of_a_file_says_how_it_is_read() {
    let folder = models();
    let generate = "generate --init llama --temperature 0 --tokens 4 --json --prompts";
    let expected = lines(&ok(&folder, &format!("{generate} prompts.txt"), &[]));
    let objects = PROMPTS.map(|prompt| format!("{}\n", json!({ "prompt": prompt })));
    for name in ["p.jsonl", "p.ndjson", "p.JSONL"] {
        // Blank lines are no prompts.
        folder.write(name, objects.join("\n \n"));
        let found = lines(&ok(&folder, &format!("{generate} {name}"), &[]));
        assert_eq!(found, expected, "{name}");
    }
    folder.write("p.json", objects.concat());
    let run = folder.run(&format!("{generate} p.json"));
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains(".jsonl"), "{}", run.stderr);
}

#[test]
fn a_token_at_the_end_that_the_model_lacks_is_named() {
    let folder = models();
    folder.write("chats.jsonl", "{\"text\": \"the cat sat\"}\n".repeat(40));
    let path = folder.path("llama/config.json");
    let config = std::fs::read_to_string(&path).expect("a file");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["eos_token_id"] = json!(50256);
    std::fs::write(&path, config.to_string()).expect("writable");
    for flags in ["", "--compile"] {
        let train = "train --init llama --data chats.jsonl --seq 8 --steps 1 --warmup 0";
        let run = folder.run(&format!("{train} --ranks 1 --batch 1 {flags}"));
        assert_eq!(run.code, 2, "{}", run.stderr);
        for word in ["`eos_token_id` is 50256", "config.json"] {
            assert!(run.stderr.contains(word), "{}", run.stderr);
        }
    }
}

#[test]
fn each_prompt_has_the_text_that_it_has_alone() {
    let folder = models();
    for model in ["llama", "gpt2"] {
        // Longer than the longest sequence, in part with early ends.
        for flags in [
            "--temperature 0",
            "--temperature 0 --stop e --stop a --stop t",
            "--temperature 0.9 --top-k 20",
        ] {
            let generate = format!("generate --init {model} --tokens 20 --json {flags}");
            let alone = |(index, prompt): (usize, &&str)| {
                let seed = (3 + index).to_string();
                let run = ok(&folder, &generate, &["--prompt", *prompt, "--seed", &seed]);
                let mut line = lines(&run).remove(0);
                line["index"] = json!(index);
                line
            };
            let alone: Vec<Value> = PROMPTS.iter().enumerate().map(alone).collect();
            let finishes = |finish: &str| alone.iter().any(|line| line["finish"] == finish);
            assert!(!flags.contains("stop") || finishes("stop"), "{alone:?}");
            assert!(flags.contains("stop") || finishes("length"), "{alone:?}");
            for ranks in ["1", "2", "3"] {
                for (batch, weights) in [
                    ("16", "sharded"),
                    ("2", "sharded"),
                    ("2", "whole"),
                    ("16", "placed"),
                    ("2", "placed"),
                ] {
                    let more = ["--prompts", "prompts.txt", "--seed", "3"];
                    let more = [&more[..], &["--ranks", ranks, "--batch", batch]].concat();
                    let more = [&more[..], &["--weights", weights]].concat();
                    let together = lines(&ok(&folder, &generate, &more));
                    assert_eq!(together, alone, "{model} {flags} {more:?}");
                }
            }
        }
    }
}

#[test]
fn several_texts_are_numbered_and_measured() {
    let folder = models();
    let generate = "generate --init gpt2 --tokens 3 --temperature 0";
    let one = |prompt| ok(&folder, generate, &["--prompt", prompt]);
    let [first, second] = [PROMPTS[0], PROMPTS[1]].map(|prompt| {
        let run = one(prompt);
        assert_eq!(run.stderr, "");
        run.stdout
    });
    let two = ok(
        &folder,
        generate,
        &["--prompt", PROMPTS[0], "--prompt", PROMPTS[1]],
    );
    assert_eq!(two.stdout, format!("[1/2]\n{first}\n[2/2]\n{second}\n"));
    for words in [
        "2 prompts: 6 tokens",
        "tokens/s",
        "keys and values: at most",
    ] {
        assert!(two.stderr.contains(words), "{}", two.stderr);
    }
    // Fields of JSON, after those of --prompt.
    folder.write("a.jsonl", "{\"q\": \"cat\"}\n{\"q\": \"a\\nb\"}\n");
    let more = [
        "--prompt",
        "the",
        "--prompts",
        "a.jsonl",
        "--prompt-field",
        "q",
    ];
    let run = ok(&folder, &format!("{generate} --json"), &more);
    let found = lines(&run);
    for (index, prompt) in ["the", "cat", "a\nb"].into_iter().enumerate() {
        let line = &found[index];
        assert_eq!(line["index"], index);
        assert_eq!(line["prompt"], prompt);
        assert_eq!(line["tokens"], 3);
        assert_eq!(line["seed"], 1 + index);
        assert_eq!(line["finish"], "length");
        assert!(line["text"].is_string(), "{line}");
    }
    let one = ok(&folder, &format!("{generate} --json"), &["--prompt", "the"]);
    assert_eq!(lines(&one), found[..1]);
    assert!(one.stderr.contains("1 prompt: 3 tokens"), "{}", one.stderr);
}

#[test]
fn wrong_prompts_are_refused_by_name() {
    let folder = models();
    folder.write("empty.txt", "");
    folder.write("blank.txt", "a\n\nb\n");
    folder.write("field.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n");
    folder.write("long.txt", format!("a\n{}\n", "the cat ".repeat(12)));
    for (flags, words) in [
        ("--prompts empty.txt", &["empty.txt", "no prompts"][..]),
        ("--prompts blank.txt", &["blank.txt, line 2", "empty"]),
        (
            "--prompts field.jsonl",
            &["field.jsonl, line 2", "`prompt`", "`text`"],
        ),
        (
            "--prompts long.txt",
            &["long.txt, line 2", "tokens", "at most 16"],
        ),
        ("--prompts nowhere.txt", &["nowhere.txt", "--prompts"]),
        ("--prompts long.txt --batch 0", &["--batch"]),
        ("--prompt a --prompt-field q", &["--prompts"]),
        ("--tokens 2", &["--prompt"]),
        ("--prompt a --chat", &["chat_template", "--chat"]),
        (
            "--prompt a --chat --tokenizer bytes",
            &["--chat", "--tokenizer FILE"],
        ),
    ] {
        let run = folder.run(&format!("generate --init gpt2 {flags}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{flags}: {}", run.stderr);
        }
    }
}

/// A message is rendered by the template, and the answer ends where the template ends the assistant's.
#[test]
fn a_chat_answers_a_message() {
    let folder = models();
    let plain = "<s>Q the cat\nA";
    let generate = "generate --init llama --tokens 10 --temperature 0 --json";
    let answer = |run: &Run| lines(run)[0]["text"].as_str().expect("a text").to_owned();
    let whole = answer(&ok(&folder, generate, &["--prompt", plain]));
    let stop = whole.chars().skip(1).find(|c| !c.is_whitespace());
    let stop = stop.expect("a letter").to_string();
    let want = ok(&folder, generate, &["--prompt", plain, "--stop", &stop]);
    assert!(answer(&want).len() < whole.len(), "{whole}");
    let template = "<s>{% for m in messages %}{% if m.role == 'user' %}Q{% else %}A{% endif %} {{ m.content }}\
                    {% if m.role == 'assistant' %}STOP{% endif %}{{ '\\n' }}{% endfor %}\
                    {% if add_generation_prompt %}A{% endif %}";
    let template = template.replace("STOP", &stop);
    let settings = json!({ "chat_template": template });
    folder.write("llama/tokenizer_config.json", settings.to_string());
    for ranks in ["1", "2"] {
        let more = [
            "--chat", "--prompt", "the cat", "--prompt", "a", "--ranks", ranks,
        ];
        let got = lines(&ok(&folder, generate, &more)).remove(0);
        for field in ["text", "finish", "prompt_tokens", "tokens"] {
            assert_eq!(got[field], lines(&want)[0][field], "{field}");
        }
        assert_eq!(got["finish"], "stop");
        assert_eq!(got["prompt"], "the cat");
    }
    // Only the answer is printed.
    let generate = generate.replace(" --json", "");
    let run = ok(&folder, &generate, &["--chat", "--prompt", "the cat"]);
    let is_safe = |c: char| !c.is_control() || c == '\n' || c == '\t';
    let shown = answer(&want).replace(|c| !is_safe(c), "\u{fffd}");
    assert_eq!(run.stdout, format!("{shown}\n"));
    let more = ["--chat", "--prompt", "the cat", "--prompt", "a"];
    let run = ok(&folder, &generate, &more);
    assert!(run.stdout.starts_with("[1/2] the cat\n"), "{}", run.stdout);
}
