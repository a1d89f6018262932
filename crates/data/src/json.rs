//! JSON as Python writes it, for templates.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::python::repr_of_float;

/// Writes JSON as Python does: with spaces after commas and colons, and without escapes for HTML.
pub(crate) fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let failed =
        |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let indent: Option<usize> = options.get("indent")?;
    // transformers has more options, which must not be ignored.
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(16));
            let lines = PrettyFormatter::with_indent(indent.as_bytes());
            let formatter = Lines(lines);
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
    }
    .map_err(failed)?;
    let text = String::from_utf8(bytes);
    let text = text.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// JSON in lines, with floats as Python writes them.
struct Lines<'a>(PrettyFormatter<'a>);

/// Passes calls on to the formatter of lines.
macro_rules! as_lines {
    ($($name:ident($($first:ident)?)),+) => {
        $(
            fn $name<W: ?Sized + io::Write>(&mut self, writer: &mut W $(, $first: bool)?) -> io::Result<()> {
                self.0.$name(writer $(, $first)?)
            }
        )+
    };
}

impl Formatter for Lines<'_> {
    as_lines!(
        begin_array(),
        end_array(),
        begin_array_value(first),
        end_array_value(),
        begin_object(),
        end_object(),
        begin_object_key(first),
        begin_object_value(),
        end_object_value()
    );

    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(repr_of_float(value).as_bytes())
    }
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(repr_of_float(value).as_bytes())
    }
}
