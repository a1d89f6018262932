//! Byte counts as text.

use std::fmt;

use crate::category::{Bytes, Category};

/// Prints the categories that have bytes, one per line.
pub(crate) struct Breakdown<'a>(pub(crate) &'a Bytes);

impl fmt::Display for Breakdown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for category in Category::ALL {
            let bytes = self.0[category];
            if bytes > 0 {
                writeln!(f, "        {}  {category}", Size(bytes))?;
            }
        }
        Ok(())
    }
}

/// A number of bytes. Prints in the largest unit in which it is at least 1, right-aligned in eleven columns.
#[derive(Debug, Clone, Copy)]
pub struct Size(pub u64);

impl Size {
    /// Returns the text without leading spaces.
    pub fn trimmed(self) -> String {
        self.to_string().trim_start().to_owned()
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = match unit {
            0 => format!("{} B", self.0),
            _ => format!("{value:.2} {}", UNITS[unit]),
        };
        write!(f, "{text:>11}")
    }
}
