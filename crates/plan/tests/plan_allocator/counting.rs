//! An allocator that counts the bytes of each rank.
//!
//! Every block stores the rank whose thread allocated it, and is counted for that rank until any thread frees it. The
//! header before a block that stores this is not counted.

#![allow(unsafe_code, reason = "an allocator cannot be written without")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Threads that belong to no rank, and at most seven ranks.
const OWNERS: usize = 8;

pub(crate) struct Counting {
    live: [AtomicUsize; OWNERS],
    peak: [AtomicUsize; OWNERS],
}

thread_local! {
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// Counts this thread's allocations from now on for this rank.
pub(crate) fn count_for(rank: usize) {
    assert!(rank + 1 < OWNERS, "there is no count for rank {rank}");
    OWNER.set(rank + 1);
}

/// Returns memory that other tests have freed to the system, because reusing it would not be noticed.
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
    // A thread that is ending no longer has this value.
    OWNER.try_with(Cell::get).unwrap_or(0)
}

impl Counting {
    pub(crate) const fn new() -> Self {
        Self {
            live: [const { AtomicUsize::new(0) }; OWNERS],
            peak: [const { AtomicUsize::new(0) }; OWNERS],
        }
    }

    /// Returns the bytes that this thread's rank has now.
    pub(crate) fn live(&self) -> usize {
        self.live[owner()].load(Relaxed)
    }

    /// Returns the maximum number of bytes since the last [`reset_peak`](Self::reset_peak).
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

/// Returns the number of bytes before a block. Their first word is the owner.
fn front(layout: Layout) -> usize {
    layout.align().max(align_of::<usize>()).max(16)
}

fn with_front(layout: Layout, num_bytes: usize) -> Option<Layout> {
    let front = front(layout);
    Layout::from_size_align(num_bytes.checked_add(front)?, front).ok()
}

impl Counting {
    /// Writes the owner into the header, and returns the start of the block after it.
    ///
    /// # Safety
    ///
    /// `block` must be null, or the system's allocation for `layout` and its header.
    unsafe fn begin(&self, block: *mut u8, layout: Layout) -> *mut u8 {
        if block.is_null() {
            return block;
        }
        let owner = owner();
        self.add(owner, layout.size());
        // SAFETY: the header has room for the word, is aligned for it, and is part of the block.
        unsafe {
            block.cast::<usize>().write(owner);
            block.add(front(layout))
        }
    }
}

// SAFETY: all memory comes from the system. Returned blocks begin after their header, whose size is a multiple of the
// alignment.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match with_front(layout, layout.size()) {
            // SAFETY: the layout is not empty, and the block has this layout.
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
        // SAFETY: `given` was allocated here with this layout, so the system's block begins one header before it.
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
        // SAFETY: as above. The header is moved with the block.
        unsafe {
            let block = given.sub(front);
            let owner = block.cast::<usize>().read();
            let moved = System.realloc(block, whole, new.size());
            if moved.is_null() {
                return moved;
            }
            // The count is increased first, so it never goes below zero.
            self.add(owner, num_bytes.saturating_sub(layout.size()));
            self.remove(owner, layout.size().saturating_sub(num_bytes));
            moved.add(front)
        }
    }
}
