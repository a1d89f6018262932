//! Errors raised inside Burn's forward and backward.
//!
//! Forward and backward return no `Result`. An error raised inside them unwinds with an [`Unwound`] payload (no panic
//! message is printed) until [`catch`], [`backward`](crate::backward) or `launch` turns it back into a value.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn_fsdp_collectives::Unwound;

use crate::ambient::{Purpose, is_within, within};
use crate::error::Error;
use crate::read::two_types;

/// Unwinds from Burn's forward or backward with `error`.
pub(crate) fn throw(error: Error) -> ! {
    let unwound = Unwound(Box::new(error));
    // On other threads, an error without a panic message would end the thread silently.
    if !is_within(Purpose::Catch) && !is_rank() {
        eprintln!("burn-fsdp: {}", unwound.0);
    }
    resume_unwind(Box::new(unwound))
}

/// Returns true if this is a thread of `launch`, which reports errors that unwind out of it.
fn is_rank() -> bool {
    let thread = std::thread::current();
    thread.name().is_some_and(|name| name.starts_with("rank "))
}

/// Runs `body`, and returns errors raised inside Burn's forward or backward as values. This includes Burn's panic on an
/// operation with tensors of two types: [`Error::TwoTypes`] names the parameter that was read last.
///
/// Other panics continue to unwind.
///
/// # Errors
///
/// The [`Error`] raised inside `body`.
pub fn catch<T>(body: impl FnOnce() -> T) -> Result<T, Error> {
    let body = || within(Purpose::Catch, body);
    catch_unwind(AssertUnwindSafe(body)).or_else(|payload| match payload.downcast::<Unwound>() {
        Ok(unwound) => match unwound.0.downcast::<Error>() {
            Ok(error) => Err(*error),
            Err(other) => resume_unwind(Box::new(Unwound(other))),
        },
        Err(panic) => match two_types(&*panic) {
            Some(error) => Err(error),
            None => resume_unwind(panic),
        },
    })
}
