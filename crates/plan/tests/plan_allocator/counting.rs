//! An allocator that counts the bytes of each rank.
//!
//! Every block remembers which rank's thread asked for it, and is counted for that rank until it is
//! freed, whoever frees it. What is in front of a block for that is not counted.

#![allow(unsafe_code, reason = "an allocator cannot be written without")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Threads that are no rank's, and at most seven ranks.
const OWNERS: usize = 8;

pub(crate) struct Counting {
    live: [AtomicUsize; OWNERS],
    peak: [AtomicUsize; OWNERS],
}

thread_local! {
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this thread allocates from now on for that rank.
pub(crate) fn count_for(rank: usize) {
    assert!(rank + 1 < OWNERS, "there is no count for rank {rank}");
    OWNER.set(rank + 1);
}

/// Gives the system back what other tests have freed, so that it is not used again without being noticed.
pub(crate) fn give_back_what_is_free() {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            safe fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

fn owner() -> usize {
    // A thread that is ending has no such value any more.
    OWNER.try_with(Cell::get).unwrap_or(0)
}

impl Counting {
    pub(crate) const fn new() -> Self {
        Self {
            live: [const { AtomicUsize::new(0) }; OWNERS],
            peak: [const { AtomicUsize::new(0) }; OWNERS],
        }
    }

    /// Bytes that this thread's rank has now.
    pub(crate) fn live(&self) -> usize {
        self.live[owner()].load(Relaxed)
    }

    /// The most that it had since the last [`reset_peak`](Self::reset_peak).
    pub(crate) fn peak(&self) -> usize {
        self.peak[owner()].load(Relaxed)
    }

    /// Begins a new measurement.
    pub(crate) fn reset_peak(&self) {
        self.peak[owner()].store(self.live(), Relaxed);
    }

    fn add(&self, owner: usize, num_bytes: usize) {
        let live = self.live[owner].fetch_add(num_bytes, Relaxed) + num_bytes;
        self.peak[owner].fetch_max(live, Relaxed);
    }

    fn remove(&self, owner: usize, num_bytes: usize) {
        self.live[owner].fetch_sub(num_bytes, Relaxed);
    }
}

/// Bytes in front of a block, of which the first word is the owner.
fn front(layout: Layout) -> usize {
    layout.align().max(align_of::<usize>()).max(16)
}

fn with_front(layout: Layout, num_bytes: usize) -> Option<Layout> {
    let front = front(layout);
    Layout::from_size_align(num_bytes.checked_add(front)?, front).ok()
}

impl Counting {
    /// # Safety
    ///
    /// `block` is null, or what the system gave for `layout` and its front.
    unsafe fn begin(&self, block: *mut u8, layout: Layout) -> *mut u8 {
        if block.is_null() {
            return block;
        }
        let owner = owner();
        self.add(owner, layout.size());
        // SAFETY: the front has room for the word, is aligned for it, and is part of the block.
        unsafe {
            block.cast::<usize>().write(owner);
            block.add(front(layout))
        }
    }
}

// SAFETY: all memory is the system's; what is given out lies behind the front of its block, which is a
// multiple of the alignment.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match with_front(layout, layout.size()) {
            // SAFETY: the layout is not empty, and the block is of it.
            Some(whole) => unsafe { self.begin(System.alloc(whole), layout) },
            None => std::ptr::null_mut(),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match with_front(layout, layout.size()) {
            // SAFETY: as above.
            Some(whole) => unsafe { self.begin(System.alloc_zeroed(whole), layout) },
            None => std::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, given: *mut u8, layout: Layout) {
        let Some(whole) = with_front(layout, layout.size()) else {
            return;
        };
        // SAFETY: `given` came from here with this layout, so that the block begins a front before it.
        unsafe {
            let block = given.sub(front(layout));
            self.remove(block.cast::<usize>().read(), layout.size());
            System.dealloc(block, whole);
        }
    }

    unsafe fn realloc(&self, given: *mut u8, layout: Layout, num_bytes: usize) -> *mut u8 {
        let wholes = (
            with_front(layout, layout.size()),
            with_front(layout, num_bytes),
        );
        let (Some(whole), Some(new)) = wholes else {
            return std::ptr::null_mut();
        };
        let front = front(layout);
        // SAFETY: as above; the front is moved with the block.
        unsafe {
            let block = given.sub(front);
            let owner = block.cast::<usize>().read();
            let moved = System.realloc(block, whole, new.size());
            if moved.is_null() {
                return moved;
            }
            // Grown first, so that no count goes below zero.
            self.add(owner, num_bytes.saturating_sub(layout.size()));
            self.remove(owner, layout.size().saturating_sub(num_bytes));
            moved.add(front)
        }
    }
}
