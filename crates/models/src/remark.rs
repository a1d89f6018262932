//! The remarks of a reader of text: the reasons for which files are left out or changed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Why a file or folder is no part of a text, or is not read as it lies there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Remark {
    /// Left out: its name begins with a dot, or it is the store of a version control.
    Hidden,
    /// Left out: it is of those that the caller has named.
    Excluded,
    /// Left out: its bytes are no text, but an image, an archive, or weights, say.
    Binary,
    /// Left out: a link leads to it, or back to where it lies, and it is read once.
    Again,
    /// Left out: a link that leads nowhere.
    BrokenLink,
    /// Left out: it cannot be read.
    Unreadable,
    /// Left out: it is neither a file nor a folder.
    Special,
    /// Read without the mark at its start that names UTF-8.
    Marked,
    /// Read as UTF-8, though it is of UTF-16 or UTF-32, by the mark at its start.
    Decoded,
    /// Read byte by byte: it is text, and not of UTF-8.
    NotUtf8,
    /// Read byte by byte, though it is no text: it was named itself.
    NamedBinary,
}

impl Remark {
    /// Returns true if what it is said of is no part of the text.
    #[must_use]
    pub fn is_left_out(self) -> bool {
        self <= Self::Special
    }

    /// Returns a few words for a report, which follow a number.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Hidden => "hidden",
            Self::Excluded => "of this run",
            Self::Binary | Self::NamedBinary => "binary",
            Self::Again => "met twice",
            Self::BrokenLink => "broken links",
            Self::Unreadable => "unreadable",
            Self::Special => "neither files nor folders",
            Self::Marked => "with a mark of UTF-8",
            Self::Decoded => "of UTF-16 or UTF-32",
            Self::NotUtf8 => "not of UTF-8",
        }
    }
}

/// The remarks on a text: how often each holds, and what it holds of first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remarks(BTreeMap<Remark, (usize, PathBuf)>);

impl Remarks {
    pub(crate) fn add(&mut self, remark: Remark, path: &Path) {
        let (count, _) = self.0.entry(remark).or_insert((0, path.to_owned()));
        *count += 1;
    }

    /// Returns each remark, how many files or folders it holds of, and the first of these.
    pub fn iter(&self) -> impl Iterator<Item = (Remark, usize, &Path)> {
        let each = self.0.iter();
        each.map(|(remark, (count, first))| (*remark, *count, first.as_path()))
    }

    /// Returns how many files or folders a remark holds of.
    #[must_use]
    pub fn count(&self, remark: Remark) -> usize {
        self.0.get(&remark).map_or(0, |(count, _)| *count)
    }
}

/// Prints what is left out as `; left out: 2 hidden, 1 binary`, and nothing if nothing is.
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
