//! Memory that is first written by the threads that compute its contents.
//!
//! Filling or copying a tensor before it is computed costs an additional pass over the memory, on one thread. The
//! elements are then not in the computing threads' caches.

#![allow(
    unsafe_code,
    reason = "memory that would be filled with zeros first is declared as written after it has been"
)]

use std::mem::MaybeUninit;

use bytemuck::Pod;
use rayon::prelude::*;

/// Returns a copy of the elements, modified by `change`, and the results of `change` for each part of `len` elements.
/// `change` receives the index and copy of the part, and the thread's scratch.
pub(crate) fn changed_copy<T, S, R>(
    elements: &[T],
    len: usize,
    change: impl Fn(usize, &mut [T], &mut S) -> R + Sync,
) -> (Vec<T>, Vec<R>)
where
    T: Pod + Send + Sync,
    S: Default,
    R: Send,
{
    let total = elements.len();
    let mut copy = Vec::with_capacity(total);
    let parts = copy.spare_capacity_mut()[..total].par_chunks_mut(len);
    let parts = parts.zip(elements.par_chunks(len)).enumerate();
    let results = parts
        .map_init(S::default, |scratch, (number, (part, source))| {
            change(number, part.write_copy_of_slice(source), scratch)
        })
        .collect();
    // SAFETY: `total` elements are allocated. The chunks of both slices agree in number and length, so all elements
    // have been written.
    unsafe { copy.set_len(total) };
    (copy, results)
}

/// Returns vectors of these lengths, each divided into `num_parts` equal parts. `add` receives a part's index and that
/// part of each vector, initially zero, and adds to it.
///
/// # Panics
///
/// If a vector cannot be divided evenly.
pub(crate) fn added_parts<T: Pod + Send + Sync, const N: usize>(
    lens: [usize; N],
    num_parts: usize,
    add: impl Fn(usize, [&mut [T]; N]) + Sync,
) -> [Vec<T>; N] {
    let is_cut = |len: &usize| len.checked_rem(num_parts).unwrap_or(*len) == 0;
    assert!(
        lens.iter().all(is_cut),
        "{num_parts} parts do not divide vectors of {lens:?} elements"
    );
    let mut vectors = lens.map(Vec::with_capacity);
    let mut lens_of = lens.iter();
    let mut chunks = vectors.each_mut().map(|vector| {
        let len = *lens_of.next().expect("a length of each vector");
        let chunk = len.checked_div(num_parts).unwrap_or(0).max(1);
        vector.spare_capacity_mut()[..len].chunks_mut(chunk)
    });
    let part = |_| {
        chunks
            .each_mut()
            .map(|chunks| chunks.next().unwrap_or_default())
    };
    let parts: Vec<[&mut [MaybeUninit<T>]; N]> = (0..num_parts).map(part).collect();
    let parts = parts.into_par_iter().enumerate();
    parts.for_each(|(number, parts)| add(number, parts.map(zeroed)));
    for (vector, len) in vectors.iter_mut().zip(lens) {
        // SAFETY: that many elements are allocated. The assertion ensures that each is in one of the parts, and all
        // parts were filled.
        unsafe { vector.set_len(len) };
    }
    vectors
}

fn zeroed<T: Pod>(part: &mut [MaybeUninit<T>]) -> &mut [T] {
    part.fill(MaybeUninit::new(T::zeroed()));
    // SAFETY: all elements have just been written.
    unsafe { part.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_changed_part_by_part() {
        let elements: Vec<u32> = (0..10).collect();
        let (copy, sums) = changed_copy(&elements, 4, |number, part, scratch: &mut Vec<u32>| {
            scratch.extend_from_slice(part);
            part.iter_mut().for_each(|x| *x += 100 * number as u32);
            part.len()
        });
        assert_eq!(copy, [0, 1, 2, 3, 104, 105, 106, 107, 208, 209]);
        assert_eq!(sums, [4, 4, 2]);
        let (copy, sums) = changed_copy(&[] as &[u32], 4, |_, _, (): &mut ()| 1);
        assert!(copy.is_empty() && sums.is_empty());
    }

    #[test]
    fn parts_of_all_vectors_begin_as_zeros() {
        let [a, b, c] = added_parts([6, 3, 0], 3, |number, [a, b, c]: [&mut [f32]; 3]| {
            assert!(c.is_empty());
            a[1] += number as f32;
            b[0] += 1.0;
        });
        assert_eq!(a, [0.0, 0.0, 0.0, 1.0, 0.0, 2.0]);
        assert_eq!(b, [1.0; 3]);
        assert!(c.is_empty());
        let [none] = added_parts::<f32, 1>([0], 0, |_, _| unreachable!());
        assert!(none.is_empty());
    }

    #[test]
    #[should_panic(expected = "2 parts do not divide vectors of [3]")]
    fn indivisible_lengths_are_rejected() {
        added_parts::<f32, 1>([3], 2, |_, _| ());
    }
}
