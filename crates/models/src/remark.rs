//! Remarks on the files of a text: the reasons why they are skipped or changed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The reason why a file or folder is not part of a text, or why its text differs from its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Remark {
    /// Skipped, because its name starts with a dot, or it is a version control folder.
    Hidden,
    /// Skipped: the caller excluded it.
    Excluded,
    /// Skipped, because it is not text, but for example an image, an archive, or weights.
    Binary,
    /// Skipped, because it was already read under another path, or is a link to a folder that contains it.
    Again,
    /// Skipped: a broken link.
    BrokenLink,
    /// Skipped: it cannot be read.
    Unreadable,
    /// Skipped, because it is neither a file nor a folder.
    Special,
    /// Read without the byte order mark of UTF-8 at its start.
    Marked,
    /// Decoded from UTF-16 or UTF-32, as its byte order mark indicates.
    Decoded,
    /// Read byte by byte: it is text, but not UTF-8.
    NotUtf8,
    /// Read byte by byte although it is not text, because the caller named the file itself.
    NamedBinary,
}

impl Remark {
    /// Returns true if the file or folder is not part of the text.
    #[must_use]
    pub fn is_left_out(self) -> bool {
        self <= Self::Special
    }

    /// Returns a phrase that follows a number in a report, such as `hidden`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Hidden => "hidden",
            Self::Excluded => "of this run",
            Self::Binary | Self::NamedBinary => "binary",
            Self::Again => "repeated",
            Self::BrokenLink => "broken links",
            Self::Unreadable => "unreadable",
            Self::Special => "neither files nor folders",
            Self::Marked => "with a UTF-8 byte order mark",
            Self::Decoded => "in UTF-16 or UTF-32",
            Self::NotUtf8 => "not in UTF-8",
        }
    }
}

/// The remarks on a text: for each, the number of files or folders and the first path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remarks(BTreeMap<Remark, (usize, PathBuf)>);

impl Remarks {
    pub(crate) fn add(&mut self, remark: Remark, path: &Path) {
        let (count, _) = self.0.entry(remark).or_insert((0, path.to_owned()));
        *count += 1;
    }

    /// Returns each remark with its number of files or folders and the first path.
    pub fn iter(&self) -> impl Iterator<Item = (Remark, usize, &Path)> {
        let each = self.0.iter();
        each.map(|(remark, (count, first))| (*remark, *count, first.as_path()))
    }

    /// Returns the number of files or folders with a remark.
    #[must_use]
    pub fn count(&self, remark: Remark) -> usize {
        self.0.get(&remark).map_or(0, |(count, _)| *count)
    }
}

/// Prints the files and folders that were skipped, as `; left out: 2 hidden, 1 binary`, or nothing if there are none.
impl fmt::Display for Remarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left_out = self.iter().filter(|(remark, ..)| remark.is_left_out());
        for (index, (remark, count, _)) in left_out.enumerate() {
            let start = if index == 0 { "; left out: " } else { ", " };
            write!(f, "{start}{count} {}", remark.word())?;
        }
        Ok(())
    }
}
