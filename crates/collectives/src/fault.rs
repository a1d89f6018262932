//! Failures on demand, to test how programs behave when a rank fails.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::Error;

/// A failure that one rank is to have at one point of one step.
///
/// ```
/// use burn_fsdp_collectives::{At, Fault, How};
///
/// let fault = Fault::parse("rank:1,step:3,at:backward,how:panic")?;
/// assert_eq!(fault, Fault { rank: 1, step: 3, at: At::Backward, how: How::Panic });
/// # Ok::<(), burn_fsdp_collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The rank of the world that fails.
    pub rank: usize,
    /// The step, as given to [`ProcessGroup::begin_step`](crate::ProcessGroup::begin_step).
    pub step: u64,
    /// Where in the step.
    pub at: At,
    /// In which way.
    pub how: How,
}

/// Where in a step a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum At {
    /// At the fault point of the forward pass.
    Forward,
    /// At the fault point of the backward pass.
    Backward,
    /// At the start of the step's first collective operation.
    Collective,
}

/// In which way a rank fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum How {
    /// It panics.
    Panic,
    /// It gets [`Error::Injected`].
    Error,
    /// It never goes on, far beyond every deadline.
    Stall,
}

impl Fault {
    /// How a fault is written.
    pub const SYNTAX: &str = "rank:N,step:N,at:forward|backward|collective,how:panic|error|stall";

    /// Reads a fault as [`SYNTAX`](Self::SYNTAX) says, the four in any order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidFault`], which says what is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let invalid = |problem| Error::InvalidFault {
            text: text.to_owned(),
            problem,
        };
        let (mut rank, mut step, mut at, mut how) = (None, None, None, None);
        for item in text.split(',') {
            let Some((key, value)) = item.trim().split_once(':') else {
                return Err(invalid(format!("{:?} has no colon", item.trim())));
            };
            let is_new = match key {
                "rank" => rank.replace(number(key, value).map_err(invalid)?).is_none(),
                "step" => step.replace(number(key, value).map_err(invalid)?).is_none(),
                "at" => at.replace(At::read(value).map_err(invalid)?).is_none(),
                "how" => how.replace(How::read(value).map_err(invalid)?).is_none(),
                _ => return Err(invalid(format!("there is no {key:?}"))),
            };
            if !is_new {
                return Err(invalid(format!("{key} is given twice")));
            }
        }
        let missing = |key| invalid(format!("{key} is missing"));
        Ok(Self {
            rank: rank.ok_or_else(|| missing("rank"))?,
            step: step.ok_or_else(|| missing("step"))?,
            at: at.ok_or_else(|| missing("at"))?,
            how: how.ok_or_else(|| missing("how"))?,
        })
    }

    /// Fails as told.
    pub(crate) fn strike(self) -> Result<(), Error> {
        match self.how {
            How::Panic => panic!("told to panic by the fault \"{self}\""),
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
        .map_err(|_| format!("{key} is {value:?}, which is not a number from 0 on"))
}

impl At {
    fn read(value: &str) -> Result<Self, String> {
        match value {
            "forward" => Ok(Self::Forward),
            "backward" => Ok(Self::Backward),
            "collective" => Ok(Self::Collective),
            _ => Err(format!("at is {value:?}, which is not a place")),
        }
    }
}

impl How {
    fn read(value: &str) -> Result<Self, String> {
        match value {
            "panic" => Ok(Self::Panic),
            "error" => Ok(Self::Error),
            "stall" => Ok(Self::Stall),
            _ => Err(format!("how is {value:?}, which is not a way to fail")),
        }
    }
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::parse(text)
    }
}

/// Prints as [`Fault::SYNTAX`] says.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            step,
            at,
            how,
        } = self;
        write!(f, "rank:{rank},step:{step},at:{at},how:{how}")
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Collective => "collective",
        })
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Panic => "panic",
            Self::Error => "error",
            Self::Stall => "stall",
        })
    }
}
