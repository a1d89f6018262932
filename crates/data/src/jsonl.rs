//! Blocks of JSONL: the lines that begin in a range of bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::document::{Document, kind};
use crate::files::{SourceFile, file_error};
use crate::place::{At, MAX_DOCUMENT_BYTES, Place};
use crate::{DataError, Fields};

const MARK: &[u8] = b"\xef\xbb\xbf";

/// The lines of one block.
#[derive(Debug)]
pub(crate) struct Lines {
    reader: BufReader<File>,
    /// The byte at which the next line begins.
    at: u64,
    /// The first byte after the block.
    end: u64,
    line: Vec<u8>,
}

impl Lines {
    /// Opens the block of the lines that begin in the range from `start` to `end`.
    pub(crate) fn open(file: &SourceFile, start: u64, end: u64) -> Result<Self, DataError> {
        let mut lines = Self {
            reader: BufReader::new(file.open()?),
            at: start,
            end,
            line: Vec::new(),
        };
        lines
            .seek()
            .map_err(|source| file_error(&file.path, source))?;
        Ok(lines)
    }

    fn seek(&mut self) -> io::Result<()> {
        if self.at > 0 {
            // The rest of the line with the byte before the block belongs to an earlier block.
            self.reader.seek(SeekFrom::Start(self.at - 1))?;
            self.at = self.at - 1 + self.reader.skip_until(b'\n')? as u64;
        }
        Ok(())
    }

    /// Reads the next line that is not blank, and returns the byte at which it begins.
    fn read_line(&mut self, file: &SourceFile) -> Result<Option<u64>, DataError> {
        while self.at < self.end {
            let start = self.at;
            self.line.clear();
            let most = MAX_DOCUMENT_BYTES as u64 + 1;
            let read = (&mut self.reader)
                .take(most)
                .read_until(b'\n', &mut self.line);
            let read = read.map_err(|source| file_error(&file.path, source))?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 == most && self.line.last() != Some(&b'\n') {
                return Err(At {
                    path: &file.path,
                    place: Place::LineAt(start),
                }
                .too_long());
            }
            self.at += read as u64;
            if !without_mark(&self.line, start).trim_ascii().is_empty() {
                return Ok(Some(start));
            }
        }
        Ok(None)
    }

    /// Skips a document without parsing it. Returns false at the end of the block.
    pub(crate) fn skip(&mut self, file: &SourceFile) -> Result<bool, DataError> {
        Ok(self.read_line(file)?.is_some())
    }

    /// Returns the next document of the block.
    pub(crate) fn next(
        &mut self,
        file: &SourceFile,
        fields: &Fields,
    ) -> Result<Option<(Document, Place)>, DataError> {
        let Some(start) = self.read_line(file)? else {
            return Ok(None);
        };
        let place = Place::LineAt(start);
        let at = At {
            path: &file.path,
            place,
        };
        let text = str::from_utf8(without_mark(&self.line, start)).map_err(|_| at.not_utf8())?;
        let value: Value = serde_json::from_str(text).map_err(|error| at.json(problem(&error)))?;
        if value.kind() != ValueKind::Map {
            return Err(at.json(format!("found {}", kind(&value))));
        }
        if matches!(fields, Fields::Chat(_))
            && let Some(number) = changed_integer(text)
        {
            return Err(at.json(format!(
                "a chat template would print the integer {number} as another number; write it as a text"
            )));
        }
        Ok(Some((Document::from_object(fields, &value, &at)?, place)))
    }
}

/// Returns the first integer of valid JSON that does not fit in 64 bits, or is a negative zero. Both would become floats.
fn changed_integer(json: &str) -> Option<&str> {
    let (mut rest, mut number) = (json, 0);
    let is_of_number = |byte: u8| byte.is_ascii_digit() || b"+-.eE".contains(&byte);
    while let Some(byte) = rest.as_bytes().get(number) {
        match byte {
            b'"' => {
                let text = &rest[number + 1..];
                let mut bytes = text.bytes().enumerate();
                let mut end = text.len();
                while let Some((index, byte)) = bytes.next() {
                    match byte {
                        b'\\' => drop(bytes.next()),
                        b'"' => {
                            end = index + 1;
                            break;
                        }
                        _ => {}
                    }
                }
                (rest, number) = (&text[end..], 0);
            }
            b'-' | b'0'..=b'9' => {
                let start = &rest[number..];
                let len = start.bytes().take_while(|byte| is_of_number(*byte)).count();
                let (found, after) = start.split_at(len);
                let is_integer = !found.contains(['.', 'e', 'E']);
                let fits = found.parse::<i64>().is_ok() || found.parse::<u64>().is_ok();
                if is_integer && (!fits || found == "-0") {
                    return Some(found);
                }
                (rest, number) = (after, 0);
            }
            _ => number += 1,
        }
    }
    None
}

/// Describes an error by its column. The line that `serde_json` counts is always 1.
fn problem(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    format!("column {} has an error: {text}", error.column())
}

fn without_mark(line: &[u8], start: u64) -> &[u8] {
    if start == 0 {
        line.strip_prefix(MARK).unwrap_or(line)
    } else {
        line
    }
}
