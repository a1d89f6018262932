//! Parsing a [`Fault`] from text, and triggering it.

use std::str::FromStr;
use std::time::Duration;

use parking_lot::Mutex;

use super::error::Error;
use super::fault::{At, Fault, How};

/// Exclusive upper bound on the number of values that a flip skips before it triggers.
const MOST_PASSED: u64 = 4;

/// The fault that is armed on a rank, if any, with the number of values that a flip has skipped.
#[derive(Debug, Default)]
pub(crate) struct Faults(Mutex<Option<(Fault, u64)>>);

impl Faults {
    pub(crate) fn arm(&self, fault: Fault) {
        *self.0.lock() = Some((fault, 0));
    }

    /// Returns true if a flip is armed for this point in this step.
    pub(crate) fn flips_at(&self, step: Option<u64>, at: At) -> bool {
        let is_here = |(fault, _): &(Fault, u64)| fault.is_at(step, at) && fault.flips();
        self.0.lock().as_ref().is_some_and(is_here)
    }

    /// Returns the bit that is to flip in `num_bytes` bytes at this point, if a flip is armed and has skipped the
    /// values before this one. Each fault triggers once, and never on an empty value.
    pub(crate) fn flip(&self, step: Option<u64>, at: At, num_bytes: usize) -> Option<usize> {
        if !self.flips_at(step, at) || num_bytes == 0 {
            return None;
        }
        let mut armed = self.0.lock();
        let (fault, passed) = armed.as_mut()?;
        *passed += 1;
        if *passed <= fault.places_passed() {
            return None;
        }
        let bit = fault.bit(num_bytes);
        *armed = None;
        Some(bit)
    }

    /// Triggers the fault that is armed for this point in this step, unless it is a flip: panics, stalls or returns an
    /// error. Each fault triggers once.
    pub(crate) fn strike(&self, step: Option<u64>, at: At) -> Result<(), Error> {
        let is_here = |(fault, _): &mut (Fault, u64)| fault.is_at(step, at) && !fault.flips();
        let struck = self.0.lock().take_if(is_here);
        struck.map_or(Ok(()), |(fault, _)| fault.strike())
    }
}

impl Fault {
    /// Parses a fault in the syntax [`SYNTAX`](Self::SYNTAX). Its fields may be in any order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidFault`], which names the problem in the text.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let invalid = |problem| Error::InvalidFault {
            text: text.to_owned(),
            problem,
        };
        let (mut rank, mut step, mut at, mut how, mut seed) = (None, None, None, None, None);
        for item in text.split(',') {
            let Some((key, value)) = item.trim().split_once(':') else {
                return Err(invalid(format!("{:?} has no colon", item.trim())));
            };
            let is_new = match key {
                "rank" => rank.replace(number(key, value).map_err(invalid)?).is_none(),
                "step" => step.replace(number(key, value).map_err(invalid)?).is_none(),
                "seed" => seed.replace(number(key, value).map_err(invalid)?).is_none(),
                "at" => at.replace(At::read(value).map_err(invalid)?).is_none(),
                "how" => how.replace(How::read(value).map_err(invalid)?).is_none(),
                _ => return Err(invalid(format!("{key:?} is not a known key"))),
            };
            if !is_new {
                return Err(invalid(format!("{key} is given twice")));
            }
        }
        let missing = |key| invalid(format!("{key} is missing"));
        let fault = Self {
            rank: rank.ok_or_else(|| missing("rank"))?,
            step: step.ok_or_else(|| missing("step"))?,
            at: at.ok_or_else(|| missing("at"))?,
            how: how.ok_or_else(|| missing("how"))?,
            seed: seed.unwrap_or_default(),
        };
        let problem = match (fault.how, fault.at) {
            (How::Flip, At::Forward | At::Backward) => {
                "how:flip flips a bit of a value; write at:collective, shard, weight, gradient, state or running"
            }
            (How::Flip, _) | (_, At::Forward | At::Backward | At::Collective) => return Ok(fault),
            _ => "the values of this place can only have a bit flipped; write how:flip",
        };
        Err(invalid(problem.to_owned()))
    }

    fn is_at(&self, step: Option<u64>, at: At) -> bool {
        self.at == at && step == Some(self.step)
    }

    /// Returns true if the fault only changes data and causes no failure by itself.
    fn flips(&self) -> bool {
        self.how == How::Flip
    }

    /// Returns the number of values that the fault skips before it triggers.
    fn places_passed(&self) -> u64 {
        self.seed % MOST_PASSED
    }

    /// Returns the index of the bit to flip in `num_bytes` bytes; `num_bytes` must be at least 1. With seed 0 it is the
    /// first bit of the middle byte.
    fn bit(&self, num_bytes: usize) -> usize {
        // The factor is odd, so all bits of the seed matter.
        let mixed = (self.seed / MOST_PASSED).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let byte = (num_bytes / 2 + (mixed >> 8) as usize % num_bytes) % num_bytes;
        8 * byte + (mixed >> 4) as usize % 8
    }

    /// Panics, stalls or returns an error, as specified. Does nothing for a flip.
    fn strike(self) -> Result<(), Error> {
        match self.how {
            How::Panic => panic!("the fault \"{self}\" made this rank panic"),
            // The owner of the value flips the bit.
            How::Flip => Ok(()),
            How::Error => Err(Error::Injected { fault: self }),
            How::Stall => loop {
                std::thread::sleep(Duration::from_secs(3600));
            },
        }
    }
}

fn number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("{key} is {value:?}, which is not a number of at least 0"))
}

impl At {
    fn read(value: &str) -> Result<Self, String> {
        match value {
            "forward" => Ok(Self::Forward),
            "backward" => Ok(Self::Backward),
            "collective" => Ok(Self::Collective),
            "shard" => Ok(Self::Shard),
            "weight" => Ok(Self::Weight),
            "gradient" => Ok(Self::Gradient),
            "state" => Ok(Self::State),
            "running" => Ok(Self::Running),
            _ => Err(format!("at is {value:?}, which is not a known place")),
        }
    }
}

impl How {
    fn read(value: &str) -> Result<Self, String> {
        match value {
            "panic" => Ok(Self::Panic),
            "error" => Ok(Self::Error),
            "stall" => Ok(Self::Stall),
            "flip" => Ok(Self::Flip),
            _ => Err(format!(
                "how is {value:?}, which is not a known kind of failure"
            )),
        }
    }
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::parse(text)
    }
}
