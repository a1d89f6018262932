//! Parsing a [`Fault`] from text, and triggering it.

use std::str::FromStr;
use std::time::Duration;

use super::error::Error;
use super::fault::{At, Fault, How};

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

    /// Panics, stalls or returns an error, as specified. Does nothing for a flip.
    pub(crate) fn strike(self) -> Result<(), Error> {
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
