//! The commands of the book's pages about fine-tuning and pre-training run as written, on a small model and little data.

use std::path::Path;
use std::process::Command;

use burn::tensor::Device;
use burn_fsdp_models::{LlamaConfig, LlamaVariant};

use crate::command::{Folder, Run};

const TOKENIZER: &str = include_str!("../../../models/tests/models/tokenizer.json");

const LLAMA: LlamaConfig = LlamaConfig {
    layers: 2,
    dim: 16,
    heads: 2,
    kv_heads: 1,
    hidden: 20,
    vocab: 300,
    seq: 64,
    rope_base: 100,
    variant: LlamaVariant::PLAIN,
};

/// Flags whose values are made small, and the values.
const SMALL: [(&str, &str); 9] = [
    ("--steps", "3"),
    ("--save-every", "2"),
    ("--seq", "24"),
    ("--layers", "2"),
    ("--dim", "16"),
    ("--heads", "2"),
    ("--vocab", "300"),
    ("--tokens", "8"),
    ("--lr-warmup", "1"),
];

/// Programs of others, which are not run.
const OTHERS: [&str; 3] = ["cargo install", "hf download", "apt-get install"];

/// Returns the commands in the page's blocks of shell text. A backslash continues a command on the next line.
fn commands(page: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    let (mut is_shell, mut is_continued) = (false, false);
    for line in page.lines() {
        if let Some(language) = line.strip_prefix("```") {
            is_shell = language == "sh";
            continue;
        }
        if !is_shell {
            continue;
        }
        let (text, continues) = match line.strip_suffix('\\') {
            Some(text) => (text, true),
            None => (line, false),
        };
        match commands.last_mut().filter(|_| is_continued) {
            Some(command) => command.push_str(text.trim_start()),
            None => commands.push(text.to_owned()),
        }
        is_continued = continues;
    }
    commands
}

/// Makes a command small, and runs its ranks as threads of one process.
fn reduced(command: &str) -> String {
    let (ranks, command) = match command.split_once(" burn-fsdp ") {
        Some((launcher, rest)) => {
            assert!(
                launcher.starts_with("mpirun -H node1:4,node2:4 "),
                "{launcher}"
            );
            (" --ranks 4", format!("burn-fsdp {rest}"))
        }
        None => ("", command.to_owned()),
    };
    let mut words: Vec<_> = command.split(' ').map(str::to_owned).collect();
    for index in 1..words.len() {
        let flag = &words[index - 1];
        // With thread ranks, there is only one machine.
        let small = match SMALL.iter().find(|(name, _)| name == flag) {
            Some((_, value)) => value,
            None if flag == "--replicate-size" => "2",
            None => continue,
        };
        words[index] = small.to_owned();
    }
    words.join(" ") + ranks
}

/// Runs a command of a page in a shell.
fn run(folder: &Folder, command: &str) {
    let program = Path::new(env!("CARGO_BIN_EXE_burn-fsdp"));
    let mut paths = vec![program.parent().expect("a folder").to_owned()];
    paths.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    let output = Command::new("sh")
        .args(["-c", command])
        .current_dir(folder.path("."))
        .env("PATH", std::env::join_paths(paths).expect("valid names"))
        .output()
        .expect("a shell");
    let run = Run::of(output);
    assert_eq!(run.code, 0, "{command}: {}{}", run.stdout, run.stderr);
}

fn runs(page: &str, folder: &Folder, num_commands: usize) {
    let mut count = 0;
    for command in commands(page) {
        if OTHERS.iter().any(|other| command.starts_with(other)) {
            continue;
        }
        run(folder, &reduced(&command));
        count += 1;
    }
    assert_eq!(count, num_commands);
}

fn exist(folder: &Folder, files: &[&str]) {
    for file in files {
        assert!(folder.path(file).exists(), "{file} in {:?}", folder.names());
    }
}

#[test]
fn a_model_is_tuned_by_the_commands_of_its_page() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("model")).expect("a writable folder");
    let model = LLAMA.init(&Device::flex(), 5).expect("valid sizes");
    let saved = model.save_hugging_face(folder.path("model"));
    saved.expect("a writable folder");
    folder.write("model/tokenizer.json", TOKENIZER);
    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
                    {% if add_generation_prompt %}assistant: {% endif %}";
    folder.write("model/chat_template.jinja", template);
    let chat = |number: usize| {
        let question = serde_json::json!({"role": "user", "content": format!("say {number}")});
        let answer = serde_json::json!({"role": "assistant", "content": number.to_string()});
        format!("{}\n", serde_json::json!({"messages": [question, answer]}))
    };
    folder.write("chats.jsonl", (0..90).map(chat).collect::<String>());
    let page = include_str!("../../../../docs/book/src/fine-tune.md");
    runs(page, &folder, 9);
    exist(
        &folder,
        &[
            "adapters-peft/adapter_config.json",
            "adapters-peft/adapter_model.safetensors",
            "merged/model.safetensors",
            "merged-again/model.safetensors",
            "tuned/model.safetensors",
            "tuned/tokenizer.json",
        ],
    );
}

#[test]
fn a_model_is_pre_trained_by_the_commands_of_its_page() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("corpus")).expect("a writable folder");
    let document = |number: usize| format!("{{\"text\": \"{}\"}}\n", "the cat sat ".repeat(number));
    for part in 0..3 {
        let documents = (2..40).map(|number| document(number + part));
        folder.write(
            &format!("corpus/{part}.jsonl"),
            documents.collect::<String>(),
        );
    }
    folder.write("tokenizer.json", TOKENIZER);
    let page = include_str!("../../../../docs/book/src/pre-train.md");
    runs(page, &folder, 7);
    exist(&folder, &["report.html", "model.safetensors"]);
    assert!(!folder.names_in("run").is_empty());
}
