//! Distinguishes text from other files, and converts text with a byte order mark to UTF-8.

use crate::remark::Remark;

/// Number of bytes at the start of a file that are examined to distinguish text from other files.
pub(crate) const HEAD_BYTES: usize = 8 << 10;

/// Text has at least this many bytes per control character.
const BYTES_PER_CONTROL: usize = 100;

/// First bytes of binary files that cannot otherwise be distinguished from text.
const NO_TEXT: [&[u8]; 2] = [b"%PDF-", b"\x1f\x8b"];

/// Encodings with a byte order mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marked {
    Utf8,
    Utf16 { is_big_endian: bool },
    Utf32 { is_big_endian: bool },
}

impl Marked {
    /// Returns the encoding that the byte order mark at the start of a file identifies, if there is one.
    pub(crate) fn of(head: &[u8]) -> Option<Self> {
        // The 32-bit mark begins with the 16-bit one.
        let marks: [(&[u8], Self); 5] = [
            (b"\xef\xbb\xbf", Self::Utf8),
            (
                b"\xff\xfe\0\0",
                Self::Utf32 {
                    is_big_endian: false,
                },
            ),
            (
                b"\0\0\xfe\xff",
                Self::Utf32 {
                    is_big_endian: true,
                },
            ),
            (
                b"\xff\xfe",
                Self::Utf16 {
                    is_big_endian: false,
                },
            ),
            (
                b"\xfe\xff",
                Self::Utf16 {
                    is_big_endian: true,
                },
            ),
        ];
        let found = marks.into_iter().find(|(mark, _)| head.starts_with(mark));
        found.map(|(_, marked)| marked)
    }

    fn mark_bytes(self) -> usize {
        match self {
            Self::Utf8 => 3,
            Self::Utf16 { .. } => 2,
            Self::Utf32 { .. } => 4,
        }
    }

    /// Returns the maximum number of bytes of a file, including its mark, that become `len` bytes of UTF-8.
    pub(crate) fn most_bytes(self, len: usize) -> usize {
        let factor = match self {
            Self::Utf8 => 1,
            Self::Utf16 { .. } => 2,
            Self::Utf32 { .. } => 4,
        };
        len.saturating_mul(factor).saturating_add(self.mark_bytes())
    }

    /// Returns the text after the mark as UTF-8, or `None` if it is not valid in the encoding. If `is_cut`, the bytes
    /// may end within a character.
    fn decode(self, bytes: &[u8], is_cut: bool) -> Option<Vec<u8>> {
        let bytes = &bytes[self.mark_bytes()..];
        let text = match self {
            Self::Utf8 => return Some(bytes.to_vec()),
            Self::Utf16 { is_big_endian } => {
                let (units, rest) = bytes.as_chunks::<2>();
                if !(rest.is_empty() || is_cut) {
                    return None;
                }
                let unit = |unit: &[u8; 2]| {
                    if is_big_endian {
                        u16::from_be_bytes(*unit)
                    } else {
                        u16::from_le_bytes(*unit)
                    }
                };
                let mut units: Vec<u16> = units.iter().map(unit).collect();
                if is_cut
                    && units
                        .last()
                        .is_some_and(|last| (0xd800..0xdc00).contains(last))
                {
                    units.pop();
                }
                String::from_utf16(&units).ok()?
            }
            Self::Utf32 { is_big_endian } => {
                let (units, rest) = bytes.as_chunks::<4>();
                if !(rest.is_empty() || is_cut) {
                    return None;
                }
                let char_of = |unit: &[u8; 4]| {
                    char::from_u32(if is_big_endian {
                        u32::from_be_bytes(*unit)
                    } else {
                        u32::from_le_bytes(*unit)
                    })
                };
                units.iter().map(char_of).collect::<Option<String>>()?
            }
        };
        Some(text.into_bytes())
    }
}

/// Returns true if a file with this start may be text.
pub(crate) fn may_be_text(head: &[u8]) -> bool {
    if matches!(
        Marked::of(head),
        Some(Marked::Utf16 { .. } | Marked::Utf32 { .. })
    ) {
        return true;
    }
    let has_other_start = NO_TEXT.iter().any(|start| head.starts_with(start));
    !has_other_start && !head.contains(&0) && !is_full_of_controls(head)
}

/// Returns the text of a file, with a remark if there is one. Text with a byte order mark is converted to UTF-8. If the
/// bytes are not text, returns them as `Err`.
pub(crate) fn text_of(bytes: Vec<u8>, is_cut: bool) -> Result<(Vec<u8>, Option<Remark>), Vec<u8>> {
    let head = &bytes[..bytes.len().min(HEAD_BYTES)];
    if !may_be_text(head) {
        return Err(bytes);
    }
    let marked = Marked::of(head);
    let text = marked.map(|marked| marked.decode(&bytes, is_cut));
    let (text, remark) = match (marked, text) {
        (Some(Marked::Utf8), Some(Some(text))) => (text, Some(Remark::Marked)),
        (_, Some(Some(text))) => (text, Some(Remark::Decoded)),
        (_, Some(None)) => return Err(bytes),
        (_, None) => (bytes, None),
    };
    if is_full_of_controls(&text) {
        return Err(text);
    }
    if is_utf8(&text, is_cut) {
        Ok((text, remark))
    } else {
        Ok((text, Some(Remark::NotUtf8)))
    }
}

fn is_utf8(text: &[u8], is_cut: bool) -> bool {
    match std::str::from_utf8(text) {
        Ok(_) => true,
        // An error without a length means that the text ends within a character.
        Err(error) => is_cut && error.error_len().is_none(),
    }
}

/// Returns true if control characters are more frequent than in text. In compressed data, about every tenth byte is a
/// control character.
fn is_full_of_controls(bytes: &[u8]) -> bool {
    // Text contains the other control characters: all kinds of spaces, backspaces, terminal colors, and the end-of-file
    // mark of old systems.
    let is_control = |byte: &&u8| matches!(**byte, 0..=7 | 0x0e..=0x19 | 0x1c..=0x1f);
    bytes.iter().filter(is_control).count() * BYTES_PER_CONTROL > bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Option<(String, Option<Remark>)> {
        let (text, remark) = text_of(bytes.to_vec(), false).ok()?;
        Some((String::from_utf8_lossy(&text).into_owned(), remark))
    }

    #[test]
    fn byte_order_marks_select_the_encoding_and_are_not_text() {
        let text = "né 🦀\n";
        let utf16 = |to: fn(u16) -> [u8; 2]| text.encode_utf16().flat_map(to).collect::<Vec<_>>();
        let utf32 = |to: fn(u32) -> [u8; 4]| {
            let chars = text.chars().map(u32::from);
            chars.flat_map(to).collect::<Vec<_>>()
        };
        for (mark, bytes, remark) in [
            (
                &b"\xef\xbb\xbf"[..],
                text.as_bytes().to_vec(),
                Remark::Marked,
            ),
            (b"\xff\xfe", utf16(u16::to_le_bytes), Remark::Decoded),
            (b"\xfe\xff", utf16(u16::to_be_bytes), Remark::Decoded),
            (b"\xff\xfe\0\0", utf32(u32::to_le_bytes), Remark::Decoded),
            (b"\0\0\xfe\xff", utf32(u32::to_be_bytes), Remark::Decoded),
        ] {
            let marked = [mark, &bytes].concat();
            assert_eq!(read(&marked), Some((text.to_owned(), Some(remark))));
            // Half a character is an error unless it is where reading stopped.
            if remark == Remark::Decoded {
                let cut = &marked[..marked.len() - 3];
                assert_eq!(read(cut), None);
                let (text, _) = text_of(cut.to_vec(), true).unwrap();
                assert!("né 🦀".as_bytes().starts_with(&text), "{text:?}");
            }
        }
        assert_eq!(read(text.as_bytes()), Some((text.to_owned(), None)));
    }

    #[test]
    fn other_encodings_are_read_as_raw_bytes() {
        for bytes in [
            &b"caf\xe9 na\xefve"[..],
            b"\x83e\x83X\x83g\n",
            b"\xff\xe0 x",
        ] {
            let (text, remark) = text_of(bytes.to_vec(), false).unwrap();
            assert_eq!((&text[..], remark), (bytes, Some(Remark::NotUtf8)));
        }
        // A character that is cut where reading stopped is not an error.
        let cut = &"né".as_bytes()[..2];
        assert_eq!(text_of(cut.to_vec(), true), Ok((cut.to_vec(), None)));
        assert_eq!(
            text_of(cut.to_vec(), false),
            Ok((cut.to_vec(), Some(Remark::NotUtf8)))
        );
    }

    #[test]
    fn other_files_are_not_text() {
        let mut random = 1_u64;
        let noise: Vec<u8> = (0..300)
            .map(|_| {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                // No zero, because a zero would identify binary data.
                ((random >> 33) as u8).max(1)
            })
            .collect();
        for bytes in [
            &b"a\0b\0c\0"[..],
            b"\x1f\x8b\x08abc",
            b"%PDF-1.4 text",
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
            &noise,
            b"\xff\xfe\x00\xd8",
        ] {
            assert_eq!(read(bytes), None, "{bytes:?}");
        }
        // Page breaks, terminal colors, and one character that does not occur in text.
        let page = format!("{}\x0c\x1b[1mx\x01", "line\n".repeat(100));
        assert_eq!(read(page.as_bytes()), Some((page, None)));
    }
}
