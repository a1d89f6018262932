//! Waiting for changes made by other threads.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::patience::Patience;

/// Number of polls before the thread yields, about 5 us: the processor's pause between two polls takes up to 50 ns. A
/// peer that waits for this core pays for every poll.
const SPINS: usize = 100;

/// The time during which the thread yields between polls, before it goes to sleep. Waking up takes 50 to 150 us, so
/// sleeping for less than a few times that would cost more than it saves.
const YIELD_FOR: Duration = Duration::from_millis(1);

/// The place where threads sleep until something in the world has changed.
///
/// # Memory ordering
///
/// A thread that makes a change rings afterwards. A waiting thread first registers as a sleeper and then looks for the
/// change. A sequentially consistent fence between the two steps on both sides guarantees that the ringer sees the
/// sleeper or the sleeper sees the change. A ringer that sees a sleeper takes the lock, so it cannot ring between the
/// sleeper's look and its sleep.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// Number of threads that poll or sleep.
    num_waiters: AtomicUsize,
    num_sleepers: AtomicUsize,
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Wakes all waiting threads to look for the caller's change.
    #[inline]
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.num_sleepers.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock());
            self.rung.notify_all();
        }
    }

    /// Returns true if a thread is waiting.
    pub(crate) fn is_awaited(&self) -> bool {
        self.num_waiters.load(Ordering::Relaxed) > 0
    }

    /// Waits until `look` returns a value, and returns it; `None` if `look` returns none before the deadline, as
    /// measured by [`Patience`].
    pub(crate) fn wait_for<T>(
        &self,
        deadline: Duration,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.num_waiters.fetch_add(1, Ordering::Relaxed);
        let found = self.look_until(deadline, look);
        self.num_waiters.fetch_sub(1, Ordering::Relaxed);
        found
    }

    fn look_until<T>(&self, deadline: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        for _ in 0..SPINS {
            if let Some(found) = look() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        while start.elapsed() < YIELD_FOR.min(deadline) {
            if let Some(found) = look() {
                return Some(found);
            }
            std::thread::yield_now();
        }
        self.sleep_until(Patience::new(deadline, start), look)
    }

    fn sleep_until<T>(
        &self,
        mut patience: Patience,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let mut guard = self.lock.lock();
        self.num_sleepers.fetch_add(1, Ordering::Relaxed);
        let found = loop {
            // Reads the time before looking, so a change just before the deadline is still found.
            let sleep = patience.spend(Instant::now());
            fence(Ordering::SeqCst);
            let found = look();
            if found.is_some() || sleep.is_zero() {
                break found;
            }
            self.rung.wait_for(&mut guard, sleep);
        };
        self.num_sleepers.fetch_sub(1, Ordering::Relaxed);
        found
    }
}
