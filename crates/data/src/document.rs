//! Documents, and their extraction from JSON.

use std::hash::Hasher;

use minijinja::Value;
use minijinja::value::ValueKind;
use twox_hash::XxHash3_64;

use crate::place::At;
use crate::{DataError, Fields};

/// A document as it was read.
#[derive(Debug)]
pub(crate) enum Document {
    Text(String),
    Completion([String; 2]),
    Chat(Chat),
}

/// The messages of a chat.
#[derive(Debug)]
pub(crate) struct Chat {
    /// JSON with the keys in their order in the file, which a template may write.
    pub(crate) messages: String,
    hash: u64,
}

impl Document {
    fn parts(&self) -> [&str; 2] {
        match self {
            Self::Text(text) | Self::Chat(Chat { messages: text, .. }) => [text, ""],
            Self::Completion([prompt, completion]) => [prompt, completion],
        }
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }

    /// Returns true if there is nothing to learn, whatever the tokenizer.
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Completion([_, completion]) => completion.is_empty(),
            Self::Chat(chat) => chat.messages == "[]",
        }
    }

    /// Returns a hash of the contents. It must never change, because it determines which documents are held out.
    pub(crate) fn hash(&self) -> u64 {
        match self {
            Self::Chat(chat) => chat.hash,
            Self::Text(_) | Self::Completion(_) => hash_of(self.parts()),
        }
    }

    /// Reads the fields of a document from an object.
    pub(crate) fn from_object(
        fields: &Fields,
        object: &Value,
        at: &At<'_>,
    ) -> Result<Self, DataError> {
        Ok(match fields {
            Fields::Text(name) => Self::Text(text_of(object, name, at)?),
            Fields::Completion { prompt, completion } => Self::Completion([
                text_of(object, prompt, at)?,
                text_of(object, completion, at)?,
            ]),
            Fields::Chat(name) => {
                let messages = field(object, name, at)?;
                check_messages(&messages, name, at)?;
                let mut canonical = String::new();
                write_canonical(&messages, &mut canonical);
                Self::Chat(Chat {
                    messages: json(&with_values(&messages)),
                    hash: hash_of([&canonical, ""]),
                })
            }
        })
    }
}

fn hash_of(parts: [&str; 2]) -> u64 {
    let mut hasher = XxHash3_64::new();
    for part in parts {
        hasher.write(&(part.len() as u64).to_le_bytes());
        hasher.write(part.as_bytes());
    }
    hasher.finish()
}

fn field(object: &Value, name: &str, at: &At<'_>) -> Result<Value, DataError> {
    match member(object, name) {
        Some(value) => Ok(value),
        None => Err(at.missing(name, names(keys(object).iter().map(String::as_str)))),
    }
}

/// Returns messages without the keys that have no value, as `transformers` passes them to templates.
fn with_values(messages: &Value) -> Value {
    let messages = messages.try_iter().into_iter().flatten();
    let messages = messages.map(|message| {
        let entries = keys(&message).into_iter().filter_map(|key| {
            let value = member(&message, &key).filter(|value| !value.is_none())?;
            Some((key, value))
        });
        entries.collect::<Value>()
    });
    messages.collect()
}

/// Returns the value of a key.
pub(crate) fn member(object: &Value, key: &str) -> Option<Value> {
    let value = object.get_item(&Value::from(key)).ok();
    value.filter(|value| !value.is_undefined())
}

/// Returns the keys of an object, in their order.
fn keys(object: &Value) -> Vec<String> {
    let keys = object.try_iter().into_iter().flatten();
    keys.map(|key| key.to_string()).collect()
}

/// Returns a value as JSON.
pub(crate) fn json(value: &Value) -> String {
    serde_json::to_string(value).expect("values come from JSON or from rows, whose keys are texts")
}

/// Lists the fields that exist, at most 20.
pub(crate) fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.take(20).map(|name| format!("`{name}`")).collect();
    if names.is_empty() {
        "no fields".to_owned()
    } else {
        names.join(", ")
    }
}

fn text_of(object: &Value, name: &str, at: &At<'_>) -> Result<String, DataError> {
    let value = field(object, name, at)?;
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(at.wrong_type(name, "text", kind(&value))),
    }
}

fn check_messages(messages: &Value, name: &str, at: &At<'_>) -> Result<(), DataError> {
    const LIST: &str = "a list of messages with a `role`";
    if messages.kind() != ValueKind::Seq {
        return Err(at.wrong_type(name, LIST, kind(messages)));
    }
    for (index, message) in messages.try_iter().into_iter().flatten().enumerate() {
        let place = || format!("{name}[{index}]");
        if message.kind() != ValueKind::Map {
            return Err(at.wrong_type(&place(), "a message with a `role`", kind(&message)));
        }
        let of_role = || format!("{}.role", place());
        match member(&message, "role") {
            Some(role) if role.as_str().is_some() => {}
            Some(other) => return Err(at.wrong_type(&of_role(), "text", kind(&other))),
            None => {
                let found = names(keys(&message).iter().map(String::as_str));
                return Err(at.missing(&of_role(), found));
            }
        }
    }
    Ok(())
}

pub(crate) fn kind(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Bool => "a boolean",
        ValueKind::Number => "a number",
        ValueKind::String => "text",
        ValueKind::Seq => "a list",
        ValueKind::Map => "an object",
        _ => "null",
    }
}

/// Writes JSON with sorted keys and without white space. It must never change, because hashes of documents cover it.
fn write_canonical(value: &Value, text: &mut String) {
    match value.kind() {
        ValueKind::Seq => {
            text.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write_canonical(&item, text);
            }
            text.push(']');
        }
        ValueKind::Map => {
            let mut keys = keys(value);
            keys.sort();
            text.push('{');
            for (index, key) in keys.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                text.push_str(&json(&Value::from(key.as_str())));
                text.push(':');
                write_canonical(&member(value, key).unwrap_or_default(), text);
            }
            text.push('}');
        }
        _ => text.push_str(&json(value)),
    }
}
