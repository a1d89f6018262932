//! The prompts of the command line and of a file, as tokens.

use std::fs;
use std::path::Path;

use burn_fsdp_data::{ChatPrompts, Format};
use burn_fsdp_models::{TextCodec, Tokenizer};
use serde_json::Value;

use crate::args::PromptArgs;
use crate::codec;
use crate::error::{InputError, PromptError};
use crate::train::ChatFiles;

/// The default field of a prompt in JSONL.
const FIELD: &str = "prompt";

/// Most names of fields in an error.
const MAX_NAMES: usize = 10;

/// A prompt as given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenPrompt {
    pub(super) text: String,
    /// Its place, for errors: `--prompt`, or a line of a file.
    place: String,
}

/// Prompts as tokens, and what ends their answers.
#[derive(Debug, Default)]
pub(super) struct Encoded {
    pub(super) tokens: Vec<Vec<i64>>,
    /// The tokens that end an answer.
    pub(super) ends: Vec<u32>,
    /// The texts before which an answer ends.
    pub(super) stops: Vec<String>,
}

/// Reads all prompts: those of --prompt, then those of --prompts.
pub(super) fn read(args: &PromptArgs) -> Result<Vec<GivenPrompt>, PromptError> {
    let own = args.prompt.iter().map(|text| GivenPrompt {
        text: text.clone(),
        place: "--prompt".to_owned(),
    });
    let mut prompts: Vec<_> = own.collect();
    if let Some(path) = &args.prompts {
        prompts.extend(of_file(path, args.prompt_field.as_deref())?);
    }
    match prompts.iter().find(|prompt| prompt.text.is_empty()) {
        Some(prompt) => Err(PromptError::Empty {
            place: prompt.place.clone(),
        }),
        None => Ok(prompts),
    }
}

fn of_file(path: &Path, field: Option<&str>) -> Result<Vec<GivenPrompt>, PromptError> {
    let text = fs::read_to_string(path).map_err(|error| PromptError::File {
        path: path.to_owned(),
        problem: error.to_string(),
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let is_jsonl = field.is_some() || Format::of(path) == Some(Format::Jsonl);
    let is_document = path
        .extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("json"));
    if is_document && !is_jsonl {
        return Err(PromptError::File {
            path: path.to_owned(),
            problem: "a .json file is neither lines of text nor JSONL; name it .txt or .jsonl"
                .to_owned(),
        });
    }
    // Blank lines of JSONL are no prompts, as in the data of a training run.
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !is_jsonl || !line.trim().is_empty());
    let prompts = lines.map(|(index, line)| {
        let place = format!("{}, line {}", path.display(), index + 1);
        let text = if is_jsonl {
            field_of(line, field.unwrap_or(FIELD), &place)?
        } else {
            line.to_owned()
        };
        Ok(GivenPrompt { text, place })
    });
    let prompts = prompts.collect::<Result<Vec<_>, PromptError>>()?;
    if prompts.is_empty() {
        return Err(PromptError::NoPrompts {
            path: path.to_owned(),
        });
    }
    Ok(prompts)
}

/// Returns the field of a JSON object.
fn field_of(line: &str, field: &str, place: &str) -> Result<String, PromptError> {
    let refused = |problem: String| PromptError::Json {
        place: place.to_owned(),
        problem,
    };
    let json: Value = serde_json::from_str(line).map_err(|error| refused(error.to_string()))?;
    let Value::Object(object) = &json else {
        return Err(refused(format!("found {}", kind(&json))));
    };
    match object.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(PromptError::FieldType {
            place: place.to_owned(),
            field: field.to_owned(),
            found: kind(other),
        }),
        None => {
            let names = object.keys().take(MAX_NAMES);
            let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
            Err(PromptError::MissingField {
                place: place.to_owned(),
                field: field.to_owned(),
                found: if names.is_empty() {
                    "no fields".to_owned()
                } else {
                    names.join(", ")
                },
            })
        }
    }
}

fn kind(json: &Value) -> &'static str {
    match json {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Returns the prompts as tokens. A model sees at most `seq` of them.
pub(super) fn encoded(
    prompts: &[GivenPrompt],
    codec: &TextCodec,
    is_chat: bool,
    seq: usize,
) -> Result<Encoded, InputError> {
    let mut encoded = Encoded::default();
    let chat = if is_chat { Some(chat(codec)?) } else { None };
    for prompt in prompts {
        let place = || prompt.place.clone();
        let tokens = match &chat {
            None => codec::prompt(codec, &prompt.text)?,
            Some((tokenizer, templates)) => {
                let chat = templates.prompt(&prompt.text).map_err(|problem| {
                    let (place, problem) = (place(), problem.to_string());
                    PromptError::Chat { place, problem }
                })?;
                if encoded.tokens.is_empty() {
                    encoded.end_turns(tokenizer, &chat.end, &chat.next)?;
                }
                // A template has its own tokens at the start, as in training.
                let tokens = tokenizer.encode(&chat.text, false)?;
                tokens.into_iter().map(i64::from).collect()
            }
        };
        if tokens.is_empty() {
            return Err(PromptError::Empty { place: place() }.into());
        }
        if tokens.len() > seq {
            let (place, tokens, longest) = (place(), tokens.len(), seq);
            return Err(PromptError::TooLong {
                place,
                tokens,
                longest,
            }
            .into());
        }
        encoded.tokens.push(tokens);
    }
    Ok(encoded)
}

/// Returns the tokenizer, and the chat template in its folder.
fn chat(codec: &TextCodec) -> Result<(&Tokenizer, ChatPrompts), InputError> {
    let TextCodec::Tokenizer(tokenizer) = codec else {
        return Err(PromptError::ChatOfBytes.into());
    };
    let files = ChatFiles::beside(tokenizer.path())?;
    let templates = ChatPrompts::new(&files.template, files.special_names)?;
    Ok((tokenizer, templates))
}

impl Encoded {
    /// Sets what ends an answer. `end` is the text that a template adds to an answer: its first token, if that is not
    /// part of a text, or else the text itself. White space, which answers contain, ends an answer only together with
    /// the start of the `next` message.
    fn end_turns(
        &mut self,
        tokenizer: &Tokenizer,
        end: &str,
        next: &str,
    ) -> Result<(), InputError> {
        let ids = tokenizer.encode(end.trim_start(), false)?;
        if let Some(id) = ids.first()
            && tokenizer.decode(&[*id])?.is_empty()
        {
            self.ends.push(*id);
            return Ok(());
        }
        let stop = match end.trim() {
            "" => next.trim_end(),
            end => end,
        };
        self.stops
            .extend((!stop.is_empty()).then(|| stop.to_owned()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(name: &str, text: &str, field: Option<&str>) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        fs::write(&path, text).expect("a writable folder");
        let args = PromptArgs {
            prompt: vec!["first".to_owned()],
            prompts: Some(path),
            prompt_field: field.map(str::to_owned),
            chat: false,
            batch: 1,
            json: false,
        };
        let prompts = read(&args).map_err(|error| error.to_string())?;
        Ok(prompts.into_iter().map(|prompt| prompt.text).collect())
    }

    #[test]
    fn prompts_are_lines_or_fields() {
        let found = prompts("a.txt", "one \r\n{\"prompt\": 1}\n", None);
        assert_eq!(found.expect("lines"), ["first", "one ", "{\"prompt\": 1}"]);
        let jsonl =
            "{\"prompt\": \"one\\ntwo\", \"q\": \"x\"}\n\n{\"q\": \"y\", \"prompt\": \"three\"}";
        let found = prompts("a.jsonl", jsonl, None);
        assert_eq!(found.expect("fields"), ["first", "one\ntwo", "three"]);
        let found = prompts("a.txt", jsonl, Some("q"));
        assert_eq!(found.expect("fields"), ["first", "x", "y"]);
    }

    #[test]
    fn wrong_prompts_are_named_by_line() {
        for (name, text, words) in [
            ("a.txt", "", &["a.txt", "no prompts"][..]),
            ("a.txt", "one\n\ntwo\n", &["a.txt, line 2", "empty"]),
            ("a.jsonl", "\n \n", &["a.jsonl", "no prompts"]),
            ("a.jsonl", "\n{\"prompt\": 3}", &["line 2", "string"]),
            ("a.jsonl", "{\"prompt\": \"\"}", &["line 1", "empty"]),
            (
                "a.jsonl",
                "{\"prompt\": 3}",
                &["line 1", "string", "a number"],
            ),
            (
                "a.jsonl",
                "{\"b\": 1, \"a\": 2}",
                &["line 1", "`prompt`", "`a`"],
            ),
            ("a.jsonl", "{}", &["line 1", "no fields"]),
            ("a.jsonl", "[1]", &["line 1", "JSON object", "a list"]),
            (
                "a.jsonl",
                "{\"prompt\": ",
                &["line 1", "JSON object", "EOF"],
            ),
        ] {
            let error = prompts(name, text, None).expect_err(text);
            for word in words {
                assert!(error.contains(word), "{text:?}: {error}");
            }
        }
    }

    #[test]
    fn an_answer_ends_with_a_token_or_a_text() {
        let json = include_str!("../../../../models/tests/models/tokenizer.json");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, json).expect("a writable folder");
        let tokenizer = Tokenizer::open(path).expect("a tokenizer");
        let ends = |end: &str, next: &str| {
            let mut encoded = Encoded::default();
            let ended = encoded.end_turns(&tokenizer, end, next);
            ended.expect("tokens");
            (encoded.ends, encoded.stops)
        };
        let text = |stop: &str| (Vec::new(), vec![stop.to_owned()]);
        assert_eq!(ends("<s>\n", "<s>\nuser: "), (vec![0], Vec::new()));
        assert_eq!(ends(" </e>\n", " </e>\nuser: "), text("</e>"));
        assert_eq!(ends("\n", "\nuser: "), text("\nuser:"));
        assert_eq!(ends("", ""), (Vec::new(), Vec::new()));
    }
}
