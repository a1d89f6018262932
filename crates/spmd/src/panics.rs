//! Panics in Burn and in user closures, as values.
//!
//! Burn panics on unsupported calls. If such a panic becomes an [`Error`](crate::error::Error), every rank would print
//! its message and backtrace before the error; this module suppresses them. Panics in other code are printed as usual:
//! outside of [`caught`], the hook calls the hook that was installed before.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::path::Path;
use std::sync::Once;

use burn_fsdp_collectives::Unwound;

thread_local! {
    /// Number of active calls of [`caught`] on this thread.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Source location of the last panic in a call of [`caught`].
    static LOCATION: RefCell<Option<String>> = const { RefCell::new(None) };
}

static INSTALL: Once = Once::new();

/// A panic that was caught.
pub(crate) struct Panic {
    /// Payload of the panic, which holds its message.
    pub(crate) payload: Box<dyn Any + Send>,
    location: Option<String>,
}

impl Panic {
    /// Returns the message of the panic, and its location if that is in the user's own code.
    pub(crate) fn text(&self) -> String {
        let text = message(self.payload.as_ref());
        match &self.location {
            Some(location) => format!("{text} (at {location})"),
            None => text,
        }
    }
}

/// Runs `body` without printing a panic in it.
pub(crate) fn caught<T>(body: impl FnOnce() -> T) -> Result<T, Panic> {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    // The panic hook cannot be changed during a panic.
    if !std::thread::panicking() {
        INSTALL.call_once(install);
    }
    DEPTH.set(DEPTH.get() + 1);
    let leave = Leave;
    let result = catch_unwind(AssertUnwindSafe(body));
    drop(leave);
    result.map_err(|payload| Panic {
        payload,
        location: LOCATION.with_borrow_mut(Option::take),
    })
}

fn install() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
        if DEPTH.get() == 0 {
            return before(info);
        }
        // Dependencies are compiled under absolute paths, which mean nothing to the user.
        let location = info.location();
        let own = location.filter(|location| !Path::new(location.file()).is_absolute());
        LOCATION.with_borrow_mut(|last| *last = own.map(ToString::to_string));
    }));
}

/// Returns the message of a panic, or of an error that unwound.
pub(crate) fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(Unwound(error)) = payload.downcast_ref::<Unwound>() {
        return error.to_string();
    }
    if let Some(text) = payload.downcast_ref::<String>() {
        return text.clone();
    }
    match payload.downcast_ref::<&'static str>() {
        Some(text) => (*text).to_owned(),
        None => "a panic without a message".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::caught;

    #[test]
    fn a_panic_has_its_message_and_place() {
        let panic = caught(|| panic!("no {}", "way")).expect_err("it panics");
        let text = panic.text();
        assert!(
            text.starts_with("no way (at ") && text.contains("panics.rs"),
            "{text}"
        );
        assert_eq!(caught(|| 3).ok(), Some(3));
    }
}
