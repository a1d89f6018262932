//! The bytes that the transport holds in addition to the tensors.
//!
//! A rank's [`BufferPool`](burn_fsdp_collectives::BufferPool) keeps the memory of dropped buffers for the next buffer
//! of the same size. Used and kept buffers together never exceed the maximum that was in use at the same time. The
//! process's allocator counts all of them, and the executor's table only counts those that tensors use.

use std::collections::VecDeque;

/// A model of the pool that counts by the same rules, without memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Transport {
    /// Sizes of the kept buffers, the most recent last.
    kept: VecDeque<u64>,
    kept_bytes: u64,
    used_bytes: u64,
    most_used_bytes: u64,
    /// Bytes in use that belong to tensors.
    visible_bytes: u64,
}

/// A buffer in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Buffer {
    num_bytes: u64,
    /// True if a tensor uses the buffer and counts its bytes.
    is_visible: bool,
}

impl Transport {
    /// Takes a buffer that no tensor uses yet.
    pub(super) fn take(&mut self, num_bytes: u64) -> Buffer {
        let num_bytes = num_bytes.next_multiple_of(8);
        self.used_bytes += num_bytes;
        self.most_used_bytes = self.most_used_bytes.max(self.used_bytes);
        if let Some(index) = self.kept.iter().rposition(|kept| *kept == num_bytes) {
            self.kept.remove(index);
            self.kept_bytes -= num_bytes;
        }
        self.evict();
        Buffer {
            num_bytes,
            is_visible: false,
        }
    }

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        let buffer = self.hide(buffer);
        self.used_bytes -= buffer.num_bytes;
        self.kept_bytes += buffer.num_bytes;
        self.kept.push_back(buffer.num_bytes);
        self.evict();
    }

    /// Marks a buffer as used by a tensor.
    pub(super) fn show(&mut self, buffer: Buffer) -> Buffer {
        if !buffer.is_visible {
            self.visible_bytes += buffer.num_bytes;
        }
        Buffer {
            is_visible: true,
            ..buffer
        }
    }

    /// Marks a buffer as used by no tensor.
    pub(super) fn hide(&mut self, buffer: Buffer) -> Buffer {
        if buffer.is_visible {
            self.visible_bytes -= buffer.num_bytes;
        }
        Buffer {
            is_visible: false,
            ..buffer
        }
    }

    /// Returns the bytes that no tensor uses.
    pub(super) fn hidden_bytes(&self) -> u64 {
        self.used_bytes + self.kept_bytes - self.visible_bytes
    }

    fn evict(&mut self) {
        while self.used_bytes + self.kept_bytes > self.most_used_bytes {
            let Some(oldest) = self.kept.pop_front() else {
                break;
            };
            self.kept_bytes -= oldest;
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_fsdp_collectives::BufferPool;

    use super::*;

    /// Compares the counts with the pool's own counts after the same calls.
    #[test]
    fn the_books_match_the_pool() {
        let (pool, mut books) = (BufferPool::new(), Transport::default());
        let mut held = Vec::new();
        for step in 0..200_usize {
            let len = [24, 8, 800, 64, 24, 1000][step * 7 % 6];
            held.push((pool.take(len), books.take(len as u64)));
            while held.len() > step * 5 % 4 {
                let (buffer, booked) = held.swap_remove(step * 3 % held.len());
                drop(buffer);
                books.give_back(booked);
            }
            let whole = pool.kept_bytes() + pool.live_bytes();
            assert_eq!(books.hidden_bytes(), whole as u64, "step {step}");
        }
    }

    #[test]
    fn shown_buffers_are_not_counted_as_hidden() {
        let mut books = Transport::default();
        let buffer = books.take(80);
        let shown = books.show(buffer);
        assert_eq!(books.hidden_bytes(), 0);
        let hidden = books.hide(shown);
        assert_eq!(books.hidden_bytes(), 80);
        books.give_back(hidden);
        assert_eq!(books.hidden_bytes(), 80);
    }
}
