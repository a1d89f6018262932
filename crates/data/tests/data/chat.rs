//! Chats written out by hand.

use std::path::Path;
use std::sync::Arc;

use burn_fsdp_data::{DataConfig, Dataset, Fields, Sequence};

use crate::files;
use crate::tokenizers::Bytes;

const CHATML: &str = "{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";

const MARKED: &str = "{{ bos_token }}{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ 'A: ' }}{%- generation -%}{{ message['content'] | trim + eos_token }}{%- endgeneration -%}
{%- else -%}
{{ 'U: ' + message['content'] + '\n' }}
{%- endif -%}
{%- endfor -%}";

fn sequence(path: &Path, template: &str) -> Sequence {
    let mut config = DataConfig::new(path, 160);
    config.fields = Fields::Chat("messages".to_owned());
    config.shuffle = None;
    let tokenizer = Bytes {
        template: Some(template.to_owned()),
    };
    let data = Dataset::open(config, Arc::new(tokenizer)).expect("it is data");
    let mut batch = data.training().next_batch(1, 0..1).expect("a batch");
    batch.remove(0)
}

/// Returns the inputs, and the targets that are learned with `.` for the others.
fn shown(row: &Sequence) -> (String, String) {
    let used = row.segments.iter().filter(|segment| **segment > 0).count();
    let char_of = |token: u32| char::from_u32(token).expect("a byte");
    let inputs = row.inputs[..used]
        .iter()
        .map(|token| char_of(*token))
        .collect();
    let targets = row.targets[..used].iter().zip(&row.learned);
    (
        inputs,
        targets
            .map(|(token, is_learned)| if *is_learned { char_of(*token) } else { '.' })
            .collect(),
    )
}

const CHAT: [[&str; 2]; 4] = [
    ["system", "S"],
    ["user", "Hi"],
    ["assistant", "Yo"],
    ["user", "Bye"],
];

fn write_lines(path: &Path) {
    let messages =
        CHAT.map(|[role, content]| serde_json::json!({ "content": content, "role": role }));
    files::write(
        path,
        format!("{}\n", serde_json::json!({ "messages": messages })),
    );
}

#[test]
fn only_the_assistants_words_are_learned() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chats.jsonl");
    write_lines(&path);
    let text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n\
                <|im_start|>user\nBye<|im_end|>\n";
    let answer = text.find("Yo").expect("it is there");
    let learned: String = (1..text.len())
        .map(|place| {
            if (answer..answer + "Yo<|im_end|>\n".len()).contains(&place) {
                &text[place..=place]
            } else {
                "."
            }
        })
        .collect();
    assert_eq!(
        shown(&sequence(&path, CHATML)),
        (text[..text.len() - 1].to_owned(), learned)
    );
}

#[test]
fn blocks_of_a_template_mark_the_assistants_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chats.jsonl");
    write_lines(&path);
    let inputs = "<s>U: S\nU: Hi\nA: Yo</s>U: Bye";
    let learned = "................Yo</s>.......";
    assert_eq!(
        shown(&sequence(&path, MARKED)),
        (inputs.to_owned(), learned.to_owned())
    );
}

#[test]
fn chats_in_parquet_are_those_in_jsonl() {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = folder.path().join("chats.jsonl");
    write_lines(&lines);
    let rows = folder.path().join("chats.parquet");
    files::write_chats(&rows, &[&CHAT, &[["user", "more"], ["assistant", "less"]]]);
    let (of_lines, of_rows) = (sequence(&lines, MARKED), sequence(&rows, MARKED));
    let first = |row: &Sequence| row.segments.iter().filter(|segment| **segment == 1).count();
    assert_eq!(first(&of_lines), first(&of_rows));
    assert_eq!(
        of_lines.inputs[..first(&of_lines)],
        of_rows.inputs[..first(&of_rows)]
    );
    assert_eq!(
        of_lines.learned[..first(&of_lines)],
        of_rows.learned[..first(&of_rows)]
    );
    assert!(of_rows.segments.contains(&2));
}

/// Templates write objects, for example the arguments of tools, and Python keeps the order of their keys.
#[test]
fn objects_have_the_order_of_the_file() {
    const ARGUMENTS: &str = "{%- for m in messages -%}{%- if m.call -%}{{ m.call|tojson }} {% for k, v in m.call.items() %}{{ k }}\
        {% endfor %} {{ m.call }}{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}";
    let folder = tempfile::tempdir().expect("a folder");
    let shown_of = |call: &str| {
        let path = folder.path().join("chats.jsonl");
        let user = r#"{"role":"user","content":"?"}"#;
        let answer = format!(r#"{{"role":"assistant","call":{call}}}"#);
        files::write(&path, format!("{{\"messages\":[{user},{answer}]}}\n"));
        shown(&sequence(&path, ARGUMENTS)).0
    };
    // Without the last character, which is only a target.
    assert_eq!(
        shown_of(r#"{"unit":"C","city":"P"}"#),
        r#"?{"unit": "C", "city": "P"} unitcity {'unit': 'C', 'city': 'P'"#
    );
    assert_eq!(
        shown_of(r#"{"city":"P","unit":"C"}"#),
        r#"?{"city": "P", "unit": "C"} cityunit {'city': 'P', 'unit': 'C'"#
    );
}

/// Which documents are held out depends on sorted keys, so it is the same for both orders.
#[test]
fn the_order_of_keys_does_not_hold_out_other_documents() {
    let folder = tempfile::tempdir().expect("a folder");
    let held_out = |swapped: bool| {
        let path = folder.path().join("chats.jsonl");
        let line = |number: usize| {
            let (role, content) = (
                "\"role\":\"assistant\"",
                format!("\"content\":\"{number}\""),
            );
            let message = if swapped {
                format!("{content},{role}")
            } else {
                format!("{role},{content}")
            };
            format!("{{\"messages\":[{{{message}}}]}}\n")
        };
        files::write(&path, (0..200).map(line).collect::<String>());
        let mut config = DataConfig::new(&path, 160);
        config.fields = Fields::Chat("messages".to_owned());
        config.held_out = 0.3;
        let tokenizer = Bytes {
            template: Some(CHATML.to_owned()),
        };
        let data = Dataset::open(config, Arc::new(tokenizer)).expect("it is data");
        let rows = data.held_out().next_batch(500, 0..500).expect("a batch");
        let mut inputs: Vec<_> = rows.into_iter().map(|row| row.inputs).collect();
        inputs.sort();
        inputs
    };
    assert!(!held_out(false).is_empty());
    assert_eq!(held_out(false), held_out(true));
}

/// `transformers` removes such keys, and Parquet has them in every row.
#[test]
fn keys_without_a_value_are_not_in_a_message() {
    const KEYS: &str = "{%- for m in messages -%}{{ m.content|default('none') }}{% for k in m %} {{ k }}{% endfor %}\
        {{ '|' }}{%- endfor -%}";
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chats.jsonl");
    let user = r#"{"role":"user","content":"?","name":null}"#;
    let answer = r#"{"role":"assistant","content":null,"call":{"x":null}}"#;
    files::write(&path, format!("{{\"messages\":[{user},{answer}]}}\n"));
    assert_eq!(
        shown(&sequence(&path, KEYS)).0,
        "? role content|none role call"
    );
}
