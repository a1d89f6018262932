//! The flags on a benchmark's command line.

use std::env::Args;

/// The words after a flag.
pub(crate) struct Value<'a> {
    flag: &'a str,
    words: &'a mut Args,
}

impl Value<'_> {
    /// Returns the next word.
    pub(crate) fn text(self) -> Option<String> {
        self.words.next()
    }

    /// Returns the next word, which must be a number.
    pub(crate) fn number(self) -> usize {
        let flag = self.flag;
        let number = self.text().and_then(|word| word.parse().ok());
        number.unwrap_or_else(|| panic!("{flag} takes a number"))
    }
}

/// Calls `set` with each flag, which reads the flag's value if it has one.
pub(crate) fn for_each(mut set: impl FnMut(&str, Value<'_>)) {
    let mut words = std::env::args();
    // The name of the program.
    words.next();
    while let Some(flag) = words.next() {
        let words = &mut words;
        set(&flag, Value { flag: &flag, words });
    }
}
