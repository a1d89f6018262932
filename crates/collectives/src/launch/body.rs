//! The body of one rank, and how it ends.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::{BoxError, LaunchError};
use super::workers::Workers;

/// An error that unwinds through code that cannot return it.
///
/// Thrown with [`std::panic::resume_unwind`], which prints nothing. [`launch()`](crate::launch()) turns it back into an
/// error.
#[derive(Debug)]
pub struct Unwound(pub Box<dyn std::error::Error + Send + Sync>);

/// The reason why a rank has no result.
pub(super) enum Cause {
    Start(BoxError),
    Failed(BoxError),
    Panicked(String),
}

/// Runs the body of one rank until it returns, fails or panics.
pub(super) fn run_rank<T, E>(
    (num_threads, has_background): (usize, bool),
    body: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, Cause>
where
    T: Send,
    E: Into<BoxError>,
{
    let workers = Workers::start(num_threads, has_background);
    let workers = workers.map_err(|error| Cause::Start(error.into()))?;
    let body = AssertUnwindSafe(|| workers.run(|| body().map_err(Into::into)));
    match catch_unwind(body) {
        Ok(result) => result.map_err(Cause::Failed),
        Err(payload) => Err(Cause::unwound(payload)),
    }
}

impl Cause {
    /// Extracts the cause from a panic's payload.
    pub(super) fn unwound(payload: Box<dyn Any + Send>) -> Self {
        let payload = match payload.downcast::<Unwound>() {
            Ok(unwound) => return Self::Failed(unwound.0),
            Err(payload) => payload,
        };
        let payload = match payload.downcast::<BoxError>() {
            Ok(error) => return Self::Failed(*error),
            Err(payload) => payload,
        };
        let text = payload
            .downcast::<String>()
            .map(|text| *text)
            .or_else(|payload| {
                payload
                    .downcast::<&'static str>()
                    .map(|text| (*text).to_owned())
            });
        Self::Panicked(text.unwrap_or_else(|_| "a payload that is not text".to_owned()))
    }

    pub(super) fn of(self, rank: usize, abandoned: Vec<usize>) -> LaunchError {
        match self {
            Self::Start(source) => LaunchError::Start { rank, source },
            Self::Failed(source) => LaunchError::Failed {
                rank,
                source,
                abandoned,
            },
            Self::Panicked(message) => LaunchError::Panicked {
                rank,
                message,
                abandoned,
            },
        }
    }
}

/// Prints an error with all its sources.
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = match self {
            Self::Panicked(message) => return write!(f, "panicked: {message}"),
            Self::Start(error) | Self::Failed(error) => error,
        };
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            // Some errors already print their source.
            let more = error.to_string();
            if !text.contains(&more) {
                text = format!("{text}: {more}");
            }
            source = error.source();
        }
        f.write_str(&text)
    }
}
