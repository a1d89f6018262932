//! Values as Python prints them, because templates are written for a renderer in Python.

use std::fmt::Write;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter};
use minijinja_contrib::pycompat;

/// Writes a value as Python's `str` does.
pub(crate) fn write_python(
    out: &mut Output<'_>,
    state: &State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            let text = repr(value)?;
            out.write_str(&text).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// Jinja's filter `string`.
pub(crate) fn to_text(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => repr(value),
    }
}

/// Calls a method of a Python value. Places in a text are counted in characters.
pub(crate) fn method(
    state: &State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let found = pycompat::unknown_method_callback(state, value, name, args)?;
    match (value.as_str(), name, found.as_usize()) {
        (Some(text), "find" | "rfind", Some(at)) => {
            let before = text.get(..at).unwrap_or(text);
            Ok(Value::from(before.chars().count()))
        }
        _ => Ok(found),
    }
}

/// Jinja's filter `round`: of two equally near numbers, the even one, as in Python.
pub(crate) fn round(
    value: &Value,
    precision: Option<usize>,
    rest: Rest<Value>,
) -> Result<Value, Error> {
    if !rest.is_empty() {
        let problem = "round has one argument here: the number of digits";
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    if value.is_integer() {
        return Ok(value.clone());
    }
    let rounded = format!(
        "{:.*}",
        precision.unwrap_or(0),
        f64::try_from(value.clone())?
    );
    let rounded: f64 = rounded
        .parse()
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "it is not a finite number"))?;
    Ok(Value::from(rounded))
}

/// Returns a float as Python's `repr` does. Rust chooses the same digits, and an exponent for the same numbers.
pub(crate) fn repr_of_float(value: f64) -> String {
    let text = format!("{value:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// Returns a value as Python's `repr` does.
fn repr(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool if value.is_true() => "True".to_owned(),
        ValueKind::Bool => "False".to_owned(),
        ValueKind::String => repr_of_text(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items: Vec<_> = value
                .try_iter()?
                .map(|item| repr(&item))
                .collect::<Result<_, _>>()?;
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let entry = |key: Value| {
                Ok(format!(
                    "{}: {}",
                    repr(&key)?,
                    repr(&value.get_item(&key)?)?
                ))
            };
            let entries: Vec<_> = value.try_iter()?.map(entry).collect::<Result<_, Error>>()?;
            format!("{{{}}}", entries.join(", "))
        }
        ValueKind::Number if value.is_integer() => value.to_string(),
        ValueKind::Number => repr_of_float(f64::try_from(value.clone())?),
        other => {
            let problem = format!("cannot print {other} inside a list or an object");
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    })
}

/// Returns a text in quotes: single ones, unless it has only those.
fn repr_of_text(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut repr = String::from(quote);
    for char in text.chars() {
        match char {
            '\\' => repr.push_str("\\\\"),
            '\n' => repr.push_str("\\n"),
            '\r' => repr.push_str("\\r"),
            '\t' => repr.push_str("\\t"),
            char if char == quote => repr.extend(['\\', char]),
            char if char.is_control() => {
                // Control characters are below U+00A0.
                let _ = write!(repr, "\\x{:02x}", u32::from(char));
            }
            char => repr.push(char),
        }
    }
    repr.push(quote);
    repr
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    #[test]
    fn values_are_printed_as_by_python() {
        let mut environment = Environment::new();
        environment.set_formatter(write_python);
        let context: Value = serde_json::from_str(
            r#"{"v": {"b": [1, 2.5, 1e-5, 0.0001, 1e16, 1.5e300, true, null, "a", "it's", "'\"\n\\\u0001\u00e9"], "a": {}}, "t": "x'\n", "n": null, "y": false}"#,
        )
        .expect("it is JSON");
        let found =
            environment.render_str("{{ v }}|{{ t }}|{{ n }}|{{ y }}|{{ none_such }}", context);
        // Python 3: print(f"{v}|{t}|{n}|{y}|") with the same values.
        let expected = "{'b': [1, 2.5, 1e-05, 0.0001, 1e+16, 1.5e+300, True, None, 'a', \"it's\", '\\'\"\\n\\\\\\x01é'], 'a': {}}|x'\n|None|False|";
        assert_eq!(found.expect("it renders"), expected);
    }
}
