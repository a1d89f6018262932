//! Plain text, divided into documents.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use crate::DataError;
use crate::document::Document;
use crate::files::{SourceFile, file_error};
use crate::place::{At, Place};

/// The size to which text is divided.
pub(crate) const TEXT_BYTES: u64 = 64 << 10;

const MARK: &str = "\u{feff}";

/// Reads document number `index` of a file.
pub(crate) fn document(source: &SourceFile, index: u64) -> Result<(Document, Place), DataError> {
    let (start, bytes) = read(source, index).map_err(|error| match error {
        Failed::Data(error) => error,
        Failed::Io(error) => file_error(&source.path, error),
    })?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let place = Place::Byte(start + error.utf8_error().valid_up_to() as u64);
        At {
            path: &source.path,
            place,
        }
        .not_utf8()
    })?;
    let text = if start == 0 {
        text.strip_prefix(MARK).map(str::to_owned).unwrap_or(text)
    } else {
        text
    };
    Ok((Document::Text(text), Place::Byte(start)))
}

enum Failed {
    Data(DataError),
    Io(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn read(source: &SourceFile, index: u64) -> Result<(u64, Vec<u8>), Failed> {
    let mut file = source.open().map_err(Failed::Data)?;
    let size = source.print.bytes;
    let start = boundary(&mut file, size, index)?;
    let end = boundary(&mut file, size, index + 1)?;
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(start))?;
    file.take(end - start).read_to_end(&mut bytes)?;
    Ok((start, bytes))
}

/// Returns the byte at which document number `index` begins: after the first line that ends past a multiple of
/// [`TEXT_BYTES`], or else at the first character from that multiple on.
fn boundary(file: &mut File, size: u64, index: u64) -> io::Result<u64> {
    let multiple = index * TEXT_BYTES;
    if index == 0 || multiple >= size {
        return Ok(multiple.min(size));
    }
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(multiple - 1))?;
    file.take(TEXT_BYTES).read_to_end(&mut bytes)?;
    let after_line = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .map(|position| position as u64);
    // At most three bytes of a character follow its first one.
    let is_start = |byte: &u8| byte & 0xc0 != 0x80;
    let at_character = bytes.iter().skip(1).take(4).position(is_start).unwrap_or(0) as u64;
    Ok(multiple + after_line.unwrap_or(at_character))
}
