//! Places in files, for messages.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::DataError;

/// Maximum size of a document in a file.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 16 << 20;

/// Where a document begins in its file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// A byte of plain text.
    Byte(u64),
    /// The line of JSONL that begins with this byte.
    LineAt(u64),
    /// A row of Parquet, counted from 1.
    Row(u64),
}

/// A place in a file, for messages.
#[derive(Debug)]
pub(crate) struct At<'a> {
    pub(crate) path: &'a Path,
    pub(crate) place: Place,
}

impl At<'_> {
    pub(crate) fn missing(&self, field: &str, found: String) -> DataError {
        let (path, place) = (self.path.to_owned(), self.place());
        DataError::MissingField {
            path,
            place,
            field: field.to_owned(),
            found,
        }
    }

    pub(crate) fn wrong_type(&self, field: &str, expected: &'static str, found: &str) -> DataError {
        let (path, place) = (self.path.to_owned(), self.place());
        DataError::FieldType {
            path,
            place,
            field: field.to_owned(),
            expected,
            found: found.to_owned(),
        }
    }

    pub(crate) fn json(&self, problem: String) -> DataError {
        DataError::Json {
            path: self.path.to_owned(),
            place: self.place(),
            problem,
        }
    }

    pub(crate) fn not_utf8(&self) -> DataError {
        DataError::NotUtf8 {
            path: self.path.to_owned(),
            place: self.place(),
        }
    }

    pub(crate) fn too_long(&self) -> DataError {
        DataError::TooLong {
            path: self.path.to_owned(),
            place: self.place(),
            limit: MAX_DOCUMENT_BYTES,
        }
    }

    /// Describes the place. The number of a line is counted only here, because reading starts between lines.
    pub(crate) fn place(&self) -> String {
        match self.place {
            Place::Byte(byte) => format!("byte {byte}"),
            Place::Row(row) => format!("row {row}"),
            Place::LineAt(byte) => match line_number(self.path, byte) {
                Some(line) => format!("line {line}"),
                None => format!("the line at byte {byte}"),
            },
        }
    }
}

/// Returns the number, from 1, of the line that begins with a byte of a file.
fn line_number(path: &Path, byte: u64) -> Option<u64> {
    let mut before = BufReader::new(File::open(path).ok()?).take(byte);
    let mut line = 1;
    loop {
        let buffer = before.fill_buf().ok()?;
        if buffer.is_empty() {
            return Some(line);
        }
        line += buffer.iter().filter(|byte| **byte == b'\n').count() as u64;
        let len = buffer.len();
        before.consume(len);
    }
}
