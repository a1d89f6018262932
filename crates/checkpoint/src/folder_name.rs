//! The names of the folders of whole steps, and of saves and removals in progress.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};

use serde::{Deserialize, Serialize};

/// Returns the name of the folder of a whole step.
pub(crate) fn of_step(step: u64) -> String {
    format!("step-{step:06}")
}

/// Returns the step whose folder has this name.
pub(crate) fn parse_step(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    // Each step has one name; otherwise two folders could claim to be the same step.
    (of_step(step) == name).then_some(step)
}

/// The name of a folder that readers ignore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hidden {
    pub(crate) step: u64,
    pub(crate) state: State,
    nonce: String,
}

/// Why a folder is hidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// A step that is being saved.
    Partial,
    /// A complete step that is being replaced with a new one of the same number.
    Replaced,
    /// A step that is being removed.
    Removed,
}

impl State {
    const ALL: [Self; 3] = [Self::Partial, Self::Replaced, Self::Removed];

    fn name(self) -> &'static str {
        match self {
            Self::Partial => "partial",
            Self::Replaced => "replaced",
            Self::Removed => "removed",
        }
    }
}

impl Hidden {
    /// Creates an unused name.
    pub(crate) fn new(step: u64, state: State) -> Self {
        Self {
            step,
            state,
            nonce: nonce(),
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (step, rest) = name.strip_prefix('.')?.split_once('.')?;
        let step = parse_step(step)?;
        let (state, nonce) = rest.split_once('-')?;
        let state = State::ALL.into_iter().find(|known| known.name() == state)?;
        let is_nonce = nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_nonce.then(|| Self {
            step,
            state,
            nonce: nonce.to_owned(),
        })
    }
}

/// Prints as `.step-000120.partial-0123456789abcdef`.
impl fmt::Display for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, state, nonce } = self;
        write!(f, ".{}.{}-{nonce}", of_step(*step), state.name())
    }
}

/// Returns 16 random hexadecimal digits, from the random seeds of the standard library's hashers.
pub(crate) fn nonce() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

/// The name of the folder in which all ranks write one step. Rank 0 sends it to the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ticket(pub(crate) Hidden);

impl Ticket {
    /// Returns the step that is being saved.
    pub fn step(&self) -> u64 {
        self.0.step
    }
}

impl From<Ticket> for String {
    fn from(ticket: Ticket) -> Self {
        ticket.0.to_string()
    }
}

impl TryFrom<String> for Ticket {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Hidden::parse(&name)
            .filter(|hidden| hidden.state == State::Partial)
            .map(Self)
            .ok_or_else(|| format!("{name:?} is not the folder of a save"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_one_name() {
        for step in [0, 120, 999_999, 1_000_000, u64::MAX] {
            assert_eq!(parse_step(&of_step(step)), Some(step));
        }
        for name in [
            "step-1",
            "step-0000001",
            "step-+00001",
            "step-",
            ".step-000001",
            "step-00000x",
        ] {
            assert_eq!(parse_step(name), None, "{name}");
        }
    }

    #[test]
    fn hidden_names_round_trip_and_differ() {
        for state in State::ALL {
            let hidden = Hidden::new(7, state);
            assert_eq!(Hidden::parse(&hidden.to_string()), Some(hidden.clone()));
            assert_ne!(hidden, Hidden::new(7, state));
        }
        for name in [
            ".step-000007.partial-",
            ".step-7.partial-0123456789abcdef",
            ".step-000007.partial-../../../../../x",
            ".git",
        ] {
            assert_eq!(Hidden::parse(name), None, "{name}");
        }
        assert!(Ticket::try_from(Hidden::new(7, State::Removed).to_string()).is_err());
    }
}
