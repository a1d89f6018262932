//! The memory of operations: recycled, bounded and counted.

mod ranks;

use std::sync::Arc;

use burn_fsdp_collectives::{BufferPool, Source};
use ranks::{gather, run};

#[test]
fn buffers_are_aligned_and_have_the_requested_length() {
    let pool = BufferPool::new();
    for len in [0, 1, 7, 8, 9, 4096] {
        let mut buffer = pool.take(len);
        assert_eq!(
            (buffer.len(), buffer.as_ref().len(), buffer.is_empty()),
            (len, len, len == 0)
        );
        assert_eq!(buffer.as_ref().as_ptr() as usize % 8, 0);
        buffer.as_mut().fill(1);
    }
}

#[test]
fn memory_is_recycled_by_size() {
    let pool = BufferPool::new();
    let address = |buffer: &burn_fsdp_collectives::Buffer| buffer.as_ref().as_ptr() as usize;
    let (first, other) = (pool.take(4096), pool.take(512));
    let at = address(&first);
    drop(first);
    assert_eq!(address(&pool.take(4096)), at);
    drop(other);
    assert_eq!(pool.kept_bytes(), 4608);
    pool.trim();
    assert_eq!((pool.kept_bytes(), pool.live_bytes()), (0, 0));
}

#[test]
fn no_more_is_kept_than_was_alive() {
    let pool = BufferPool::new();
    drop([pool.take(4096), pool.take(4096)]);
    assert_eq!(pool.kept_bytes(), 8192);
    // Other sizes evict the memory kept longest.
    let odd: Vec<_> = (0..3).map(|_| pool.take(2048)).collect();
    assert!(pool.kept_bytes() + 3 * 2048 <= 8192);
    drop(odd);
    assert!(pool.kept_bytes() <= 8192);
}

#[test]
fn bytes_are_counted_while_they_live() {
    let pool = BufferPool::new();
    let first = pool.take(100);
    let second = pool.take(50);
    let account = pool.account(1000);
    assert_eq!((pool.live_bytes(), account.len()), (1150, 1000));
    // A shared buffer lives until the last of its owners is dropped.
    let source = Source::new(second);
    let clone = source.clone();
    drop((first, account, source));
    assert_eq!((pool.live_bytes(), pool.peak_bytes()), (50, 1150));
    pool.reset_peak();
    assert_eq!(pool.peak_bytes(), 50);
    drop(clone);
    assert_eq!(pool.live_bytes(), 0);
    let again = Source::from_arc(Arc::new(pool.take(80)));
    assert_eq!((pool.live_bytes(), again.len()), (80, 80));
}

#[test]
fn buffers_outlive_their_pool() {
    let buffer = BufferPool::new().take(16);
    assert_eq!(buffer.as_ref(), [0; 16]);
    assert!(Source::empty().is_empty());
}

#[test]
fn a_rank_has_one_pool_and_operations_leave_nothing_behind() {
    let live = run(3, |world| {
        let half = world.split(world.rank() % 2, 0, "half")?;
        let kept = half.pool().take(24);
        for _ in 0..3 {
            gather(&world, "x", 30)?;
            let into = vec![half.pool().take(28)];
            let part = vec![ranks::full(&half, 7)];
            let sum = burn_fsdp_collectives::Reduction::sum();
            let _ = half
                .start_all_reduce("y", vec![], sum, part, into)?
                .wait_released()?;
        }
        let live = world.pool().live_bytes();
        drop(kept);
        Ok((live, world.pool().live_bytes()))
    });
    assert_eq!(live, [(24, 0); 3]);
}
