//! Documents, and their extraction from JSON.

use std::hash::Hasher;

use serde_json::Value;
use twox_hash::XxHash3_64;

use crate::place::At;
use crate::{DataError, Fields};

/// A document as it was read.
#[derive(Debug)]
pub(crate) enum Document {
    Text(String),
    Completion([String; 2]),
    /// A list of messages as canonical JSON.
    Chat(String),
}

impl Document {
    fn parts(&self) -> [&str; 2] {
        match self {
            Self::Text(text) | Self::Chat(text) => [text, ""],
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
            Self::Chat(messages) => messages == "[]",
        }
    }

    /// Returns a hash of the contents. It must never change, because it determines which documents are held out.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = XxHash3_64::new();
        for part in self.parts() {
            hasher.write(&(part.len() as u64).to_le_bytes());
            hasher.write(part.as_bytes());
        }
        hasher.finish()
    }

    /// Takes the fields of a document from an object.
    pub(crate) fn from_object(
        fields: &Fields,
        object: &mut serde_json::Map<String, Value>,
        at: &At<'_>,
    ) -> Result<Self, DataError> {
        Ok(match fields {
            Fields::Text(name) => Self::Text(take_text(object, name, at)?),
            Fields::Completion { prompt, completion } => Self::Completion([
                take_text(object, prompt, at)?,
                take_text(object, completion, at)?,
            ]),
            Fields::Chat(name) => {
                let messages = take(object, name, at)?;
                check_messages(&messages, name, at)?;
                let mut text = String::new();
                write_canonical(&messages, &mut text);
                Self::Chat(text)
            }
        })
    }
}

fn take(
    object: &mut serde_json::Map<String, Value>,
    name: &str,
    at: &At<'_>,
) -> Result<Value, DataError> {
    object
        .remove(name)
        .ok_or_else(|| at.missing(name, names(object.keys().map(String::as_str))))
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

fn take_text(
    object: &mut serde_json::Map<String, Value>,
    name: &str,
    at: &At<'_>,
) -> Result<String, DataError> {
    match take(object, name, at)? {
        Value::String(text) => Ok(text),
        other => Err(at.wrong_type(name, "text", kind(&other))),
    }
}

fn check_messages(messages: &Value, name: &str, at: &At<'_>) -> Result<(), DataError> {
    const LIST: &str = "a list of messages with a `role`";
    let Value::Array(all) = messages else {
        return Err(at.wrong_type(name, LIST, kind(messages)));
    };
    for (index, message) in all.iter().enumerate() {
        let place = || format!("{name}[{index}]");
        let Value::Object(message) = message else {
            return Err(at.wrong_type(&place(), "a message with a `role`", kind(message)));
        };
        match message.get("role") {
            Some(Value::String(_)) => {}
            Some(other) => {
                return Err(at.wrong_type(&format!("{}.role", place()), "text", kind(other)));
            }
            None => {
                let found = names(message.keys().map(String::as_str));
                return Err(at.missing(&format!("{}.role", place()), found));
            }
        }
    }
    Ok(())
}

pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Writes JSON with sorted keys. `serde_json` sorts them unless another crate enables its feature `preserve_order`,
/// which must not change the hash.
fn write_canonical(value: &Value, text: &mut String) {
    match value {
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write_canonical(item, text);
            }
            text.push(']');
        }
        Value::Object(object) => {
            let mut entries: Vec<_> = object.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            text.push('{');
            for (index, (key, item)) in entries.into_iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push(':');
                write_canonical(item, text);
            }
            text.push('}');
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}
