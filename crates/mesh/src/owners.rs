//! The owners of parameters that are not divided among ranks.

use std::cmp::Reverse;

/// Returns the rank that owns each size, in the order of `sizes`. Sizes are assigned from the largest to the smallest,
/// each to the rank with the smallest total so far (the first of them if several are equal). The largest total is at
/// most 4/3 of the least possible one (Graham, "Bounds on multiprocessing timing anomalies", 1969).
pub fn balanced_owners(sizes: &[usize], num_ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| Reverse(sizes[index]));
    let mut loads = vec![0usize; num_ranks];
    let mut owners = vec![0; sizes.len()];
    for index in order {
        let lightest = (0..num_ranks).min_by_key(|&rank| loads[rank]);
        owners[index] = lightest.unwrap_or(0);
        loads[owners[index]] += sizes[index];
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::balanced_owners as balanced;

    fn largest_over_mean(sizes: &[usize], num_ranks: usize) -> f64 {
        let mut loads = vec![0usize; num_ranks];
        for (size, owner) in sizes.iter().zip(balanced(sizes, num_ranks)) {
            loads[owner] += size;
        }
        let mean = sizes.iter().sum::<usize>() as f64 / num_ranks as f64;
        let largest = loads.iter().max().copied().unwrap_or(0);
        largest as f64 / mean
    }

    /// The matrices of GPT-3 13B (arXiv 2005.14165, table 2.1), with an untied head.
    fn gpt_13b() -> Vec<usize> {
        let (layers, dim, vocabulary, positions) = (40, 5_140, 50_257, 2_048);
        let block = [3 * dim * dim, dim * dim, 4 * dim * dim, 4 * dim * dim];
        let ends = [vocabulary * dim, positions * dim, vocabulary * dim];
        ends.into_iter()
            .chain((0..layers).flat_map(|_| block))
            .collect()
    }

    /// The matrices of Llama 2 70B (arXiv 2307.09288, table 1; keys and values of 8 heads).
    fn llama_70b() -> Vec<usize> {
        let (layers, dim, hidden, vocabulary, keys) = (80, 8_192, 28_672, 32_000, 1_024);
        let block = [
            dim * dim,
            keys * dim,
            keys * dim,
            dim * dim,
            hidden * dim,
            hidden * dim,
            hidden * dim,
        ];
        let ends = [vocabulary * dim, vocabulary * dim];
        ends.into_iter()
            .chain((0..layers).flat_map(|_| block))
            .collect()
    }

    #[test]
    fn owners_of_large_models_are_balanced() {
        for num_ranks in [2, 3, 4, 8, 16, 32] {
            for sizes in [gpt_13b(), llama_70b()] {
                let ratio = largest_over_mean(&sizes, num_ranks);
                assert!(ratio <= 1.15, "{ratio} on {num_ranks} ranks");
            }
        }
    }

    #[test]
    fn equal_sizes_rotate_and_few_sizes_leave_ranks_empty() {
        assert_eq!(balanced(&[5, 5, 5, 5], 2), [0, 1, 0, 1]);
        assert_eq!(balanced(&[1, 9, 4], 4), [2, 0, 1]);
        assert_eq!(balanced(&[3, 4], 1), [0, 0]);
    }
}
