//! The settings of a `config.json`, by name, as transformers reads them.
//!
//! An absent setting has transformers' default. A value that transformers does not accept for a setting, such as null
//! or another type, is an error, because guessing its meaning could silently change the mathematics.

use std::path::Path;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use crate::ModelError;

/// Maximum size of a file.
const MAX_BYTES: u64 = 1 << 20;

/// The settings of one JSON object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings<'a> {
    map: &'a Map<String, Value>,
}

/// A setting that exists: its name in the file, and its value.
type Setting<'a> = (&'a str, &'a Value);

impl<'a> Settings<'a> {
    pub(crate) fn of(map: &'a Map<String, Value>) -> Self {
        Self { map }
    }

    /// Returns the settings of an empty object.
    pub(crate) fn empty() -> Self {
        static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        Self { map: &EMPTY }
    }

    /// Returns a setting if it exists. It may be null.
    fn get(&self, name: &'a str) -> Option<&'a Value> {
        self.map.get(name)
    }

    /// Returns the value of a setting, unless it is absent or null.
    pub(crate) fn given(&self, name: &'a str) -> Option<&'a Value> {
        self.get(name).filter(|value| !value.is_null())
    }

    /// Returns true if a setting is present. It may be null.
    pub(crate) fn has(&self, name: &'a str) -> bool {
        self.get(name).is_some()
    }

    /// Returns all settings.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let all = self.map.iter();
        all.map(|(name, value)| (name.as_str(), value))
    }

    /// Returns true if any setting is an object.
    pub(crate) fn has_objects(&self) -> bool {
        self.map.values().any(Value::is_object)
    }

    /// Returns a setting that may have several names, with the name that it has.
    ///
    /// # Errors
    ///
    /// If two names have different values, because versions of transformers differ in which name takes precedence.
    fn one_of(&self, names: &[&'a str]) -> Result<Option<Setting<'a>>, String> {
        let there = names
            .iter()
            .filter_map(|&name| Some((name, self.get(name)?)));
        let mut first: Option<Setting<'a>> = None;
        for (name, value) in there {
            match first {
                None => first = Some((name, value)),
                Some((other, known)) if !is_same(known, value) => {
                    return Err(contradiction((other, known), (name, value)));
                }
                Some(_) => {}
            }
        }
        Ok(first)
    }

    /// Returns a whole number, or the default. The setting may have several names.
    pub(crate) fn size(&self, names: &[&'a str], default: usize) -> Result<usize, String> {
        match self.one_of(names)? {
            None => Ok(default),
            Some(setting) => size(setting),
        }
    }

    /// Returns a whole number that may be absent or null.
    pub(crate) fn optional_size(&self, name: &'a str) -> Result<Option<usize>, String> {
        let given = self.given(name);
        given.map(|value| size((name, value))).transpose()
    }

    /// Returns a whole number that may be null, or the default if it is absent.
    pub(crate) fn nullable_size(
        &self,
        name: &'a str,
        default: Option<usize>,
    ) -> Result<Option<usize>, String> {
        match self.get(name) {
            None => Ok(default),
            Some(_) => self.optional_size(name),
        }
    }

    /// Returns a number that may be absent or null.
    pub(crate) fn optional_number(&self, name: &'a str) -> Result<Option<f64>, String> {
        let given = self.given(name);
        given.map(|value| number((name, value))).transpose()
    }

    /// Returns a number that has several names, or `None` if it is absent.
    pub(crate) fn number_of(&self, names: &[&'a str]) -> Result<Option<f64>, String> {
        self.one_of(names)?.map(number).transpose()
    }

    /// Returns a list of numbers.
    pub(crate) fn numbers(&self, name: &'a str) -> Result<Vec<f64>, String> {
        let list = self.given(name).and_then(Value::as_array);
        let list = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        list.ok_or_else(|| {
            format!(
                "`{name}` is {}, expected a list of numbers",
                self.shown(name)
            )
        })
    }

    /// Returns a list of strings that may be absent or null.
    pub(crate) fn words(&self, name: &'a str) -> Result<Option<Vec<&'a str>>, String> {
        let Some(value) = self.given(name) else {
            return Ok(None);
        };
        let list = value.as_array();
        let list = list.and_then(|list| list.iter().map(Value::as_str).collect());
        match list {
            Some(list) => Ok(Some(list)),
            None => Err(unfit((name, value), "a list of strings")),
        }
    }

    /// Returns a setting's value for an error.
    pub(crate) fn shown(&self, name: &str) -> String {
        self.map.get(name).map_or("absent".to_owned(), shown)
    }

    /// Returns a number, or `None` if it is absent.
    pub(crate) fn number(&self, name: &'a str) -> Result<Option<f64>, String> {
        let value = self.get(name);
        value.map(|value| number((name, value))).transpose()
    }

    /// Returns a boolean, or the default.
    pub(crate) fn flag(&self, name: &'a str, default: bool) -> Result<bool, String> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(value) => Err(unfit((name, value), "true or false")),
        }
    }

    /// Returns a string, or the default. The setting may have several names.
    pub(crate) fn word(&self, names: &[&'a str], default: &'a str) -> Result<&'a str, String> {
        match self.one_of(names)? {
            None => Ok(default),
            Some((_, Value::String(value))) => Ok(value),
            Some(setting) => Err(unfit(setting, "a string")),
        }
    }

    /// Returns the settings in a nested object, or `None` if it is absent, null or empty.
    pub(crate) fn nested(&self, name: &'a str) -> Result<Option<Self>, String> {
        match self.given(name) {
            None => Ok(None),
            Some(Value::Object(map)) if map.is_empty() => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { map })),
            Some(value) => Err(unfit((name, value), "an object or null")),
        }
    }
}

fn size((name, value): Setting<'_>) -> Result<usize, String> {
    let number = value
        .as_u64()
        .and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| unfit((name, value), "a whole number"))
}

fn number((name, value): Setting<'_>) -> Result<f64, String> {
    value
        .as_f64()
        .ok_or_else(|| unfit((name, value), "a number"))
}

fn unfit((name, value): Setting<'_>, expected: &str) -> String {
    let default = if value.is_null() {
        "; omit it to use transformers' default"
    } else {
        ""
    };
    format!("`{name}` is {value}, expected {expected}{default}")
}

/// Returns the error message for one setting under two names with different values.
pub(crate) fn contradiction(one: (&str, &Value), other: (&str, &Value)) -> String {
    format!(
        "`{}` is {} and `{}` is {}, but both set the same thing, and versions of transformers disagree on which one \
         applies; remove the wrong one",
        one.0, one.1, other.0, other.1
    )
}

/// Returns true for equal values. 1 and 1.0 are the same number.
pub(crate) fn is_same(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

/// Returns a value for an error. Long values are cut.
pub(crate) fn shown(value: &Value) -> String {
    const MOST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// Returns an error for the first setting that a model does not support. Each entry of `asked` contains a name, true if
/// the value is unsupported, and the supported value.
pub(crate) fn refuse(
    model: &str,
    settings: Settings<'_>,
    asked: &[(&str, bool, &str)],
) -> Result<(), String> {
    match asked.iter().find(|(_, differs, _)| *differs) {
        None => Ok(()),
        Some((setting, _, expected)) => Err(refusal(
            model,
            (setting, &settings.shown(setting)),
            expected,
        )),
    }
}

/// Returns the message for a setting that a model does not support.
pub(crate) fn refusal(model: &str, (setting, found): (&str, &str), expected: &str) -> String {
    format!(
        "`{setting}` is {found}, but this {model} supports only {expected}; load a checkpoint that has it, or write \
         the model as your own Burn module"
    )
}

/// Reads the `config.json` of a folder, converts its settings with `take`, and validates the result.
pub(crate) fn read_config<C>(
    folder: &Path,
    take: impl FnOnce(Settings<'_>) -> Result<C, String>,
    validate: impl FnOnce(&C) -> Result<(), ModelError>,
) -> Result<C, ModelError> {
    let path = folder.join("config.json");
    let map = read_json(&path)?;
    let taken = take(Settings::of(&map)).and_then(|taken| {
        let valid = validate(&taken).map_err(|error| error.to_string());
        valid.map(|()| taken)
    });
    taken.map_err(|problem| ModelError::MalformedConfig { path, problem })
}

/// Reads a small JSON file that contains an object. The last of duplicate keys wins, as in Python.
pub(crate) fn read_json(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let malformed = |problem: String| ModelError::MalformedConfig {
        path: path.to_owned(),
        problem,
    };
    let file_error = |source| ModelError::File {
        path: path.to_owned(),
        source,
    };
    let metadata = path.metadata().map_err(file_error)?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        let problem = format!("it is not a regular file of at most {MAX_BYTES} bytes");
        return Err(malformed(problem));
    }
    let text = std::fs::read(path).map_err(file_error)?;
    match serde_json::from_slice(&text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(malformed("it is not a JSON object".to_owned())),
        Err(error) => Err(malformed(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings_of(json: &Value) -> Settings<'_> {
        Settings::of(json.as_object().expect("an object"))
    }

    #[test]
    fn a_setting_of_two_names_has_one_value() {
        let json = json!({"a": 3, "b": 3.0, "c": 4, "d": null});
        let settings = settings_of(&json);
        assert_eq!(settings.size(&["a", "b"], 9), Ok(3));
        assert_eq!(settings.size(&["x", "c"], 9), Ok(4));
        assert_eq!(settings.size(&["x", "y"], 9), Ok(9));
        for names in [["a", "c"], ["a", "d"]] {
            let problem = settings.size(&names, 9).expect_err("two values");
            assert!(names.iter().all(|name| problem.contains(name)), "{problem}");
        }
    }

    #[test]
    fn null_and_mistyped_settings_are_named() {
        let json = json!({"a": null, "b": "3", "c": 3.5, "d": 1});
        let settings = settings_of(&json);
        assert_eq!(settings.optional_size("a"), Ok(None));
        assert_eq!(settings.optional_size("d"), Ok(Some(1)));
        for problem in [
            settings.size(&["a"], 9).map(|_| ()).expect_err("null"),
            settings.number("a").map(|_| ()).expect_err("null"),
            settings.word(&["a"], "").map(|_| ()).expect_err("null"),
        ] {
            assert!(
                problem.contains("`a`") && problem.contains("omit it"),
                "{problem}"
            );
        }
        let flag = settings.flag("d", true).expect_err("a number");
        assert!(flag.contains("`d` is 1"), "{flag}");
        let text = settings.number("b").expect_err("a string");
        assert!(text.contains("`b` is \"3\""), "{text}");
        assert!(settings.size(&["c"], 9).is_err());
        assert!(settings.nested("d").is_err());
    }
}
