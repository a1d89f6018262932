//! Faults in a build without the feature `faults`: none can be created, and none happens.

use std::str::FromStr;

use super::error::Error;
use super::fault::{At, Fault};

/// No fault.
#[derive(Debug, Default)]
pub(crate) struct Faults {}

impl Faults {
    pub(crate) fn arm(&self, _: Fault) {}

    pub(crate) fn flips_at(&self, _: Option<u64>, _: At) -> bool {
        false
    }

    pub(crate) fn flip(&self, _: Option<u64>, _: At, _: usize) -> Option<usize> {
        None
    }

    pub(crate) fn strike(&self, _: Option<u64>, _: At) -> Result<(), Error> {
        Ok(())
    }
}

impl Fault {
    /// Rejects any fault, because this program cannot make it happen.
    ///
    /// # Errors
    ///
    /// [`Error::NoFaults`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let text = text.to_owned();
        Err(Error::NoFaults { text })
    }
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::parse(text)
    }
}
