//! The signals that end a command and prevent restarts.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::process::is_ignored;
use crate::tether;

/// The time in which several signals count as one request: `timeout` and some schedulers signal a process and then its
/// group.
pub(crate) const ONE_REQUEST: Duration = Duration::from_secs(1);

/// What a signal requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// End cleanly: the first signal.
    End(i32),
    /// End at once: a later signal, or SIGQUIT.
    AtOnce(i32),
}

/// The signals that this process handles.
#[derive(Debug)]
pub(super) struct Signals {
    /// Each signal with a flag that is set when the signal arrives and cleared when it is taken.
    flags: Vec<(i32, Arc<AtomicBool>)>,
    /// The time when the first signal was taken.
    first: Cell<Option<Instant>>,
}

impl Signals {
    /// Registers handlers for the signals, so this process lives until the command has ended. Signals that this process
    /// was started to ignore, as by `nohup`, stay ignored. The end of a parent `launch` counts as SIGTERM.
    pub(super) fn obey() -> Self {
        let signals = [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGQUIT].into_iter();
        let flags = signals.filter(|signal| !is_ignored(*signal));
        let flags = flags.map(|signal| {
            let flag = Arc::new(AtomicBool::new(false));
            // If the system refuses, signals keep their default effect.
            let _ = flag::register(signal, flag.clone());
            (signal, flag)
        });
        let mut flags: Vec<_> = flags.collect();
        let above = Arc::new(AtomicBool::new(false));
        tether::tell(above.clone(), true);
        flags.push((SIGTERM, above));
        Self {
            flags,
            first: Cell::new(None),
        }
    }

    /// Returns the order of the signals that have arrived since the last call. Returns `None` if there are none, or if
    /// they belong to the first request.
    pub(super) fn take(&self) -> Option<Order> {
        let flags = self.flags.iter();
        let come = flags.filter(|(_, flag)| flag.swap(false, Ordering::Relaxed));
        let come: Vec<_> = come.map(|(signal, _)| *signal).collect();
        let signal = *come.first()?;
        let first = self.first.get();
        self.first.set(first.or(Some(Instant::now())));
        if come.contains(&SIGQUIT) {
            return Some(Order::AtOnce(SIGQUIT));
        }
        match first {
            None => Some(Order::End(signal)),
            Some(first) if first.elapsed() < ONE_REQUEST => None,
            Some(_) => Some(Order::AtOnce(signal)),
        }
    }

    /// Returns true if a signal was ever taken.
    pub(super) fn have_come(&self) -> bool {
        self.first.get().is_some()
    }
}
