//! The owners of parameters that are not divided among ranks.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::grouping::{self, holding};
use crate::error::Error;
use crate::policy::ShardPolicy;
use crate::slot::{Holding, MAX_DIMS};
use crate::survey::Found;

/// Returns the owner of each parameter that the policy gives to one rank, by path.
///
/// # Errors
///
/// [`Error::UnmatchedPattern`]; [`Error::Option`] for a parameter of too many dims to be shown to an optimizer.
pub(super) fn of<'a>(
    parameters: impl Iterator<Item = &'a Found> + Clone,
    num_ranks: usize,
    policy: &ShardPolicy,
) -> Result<HashMap<String, usize>, Error> {
    for pattern in &policy.one_owner {
        let mut paths = parameters.clone().map(|found| found.path.as_str());
        if !paths.any(|path| pattern.prefix_of(path).is_some()) {
            let paths = parameters.map(|found| found.path.as_str());
            return Err(grouping::unmatched(pattern.as_str(), paths));
        }
    }
    let is_owned = |found: &&Found| {
        let mut patterns = policy.one_owner.iter();
        let matches = patterns.any(|pattern| pattern.prefix_of(&found.path).is_some());
        matches && holding(found, policy) == Holding::Shard
    };
    let owned: Vec<&Found> = parameters.filter(is_owned).collect();
    if let Some(found) = owned.iter().find(|found| found.shape.len() > MAX_DIMS) {
        return Err(Error::Option {
            option: "one_owner",
            expected: "parameters of at most 6 dims",
            got: format!("`{}` of shape {:?}", found.path, found.shape),
        });
    }
    let sizes: Vec<_> = owned.iter().map(|found| found.num_elements()).collect();
    let owners = balanced(&sizes, num_ranks);
    let paths = owned.iter().map(|found| found.path.clone());
    Ok(paths.zip(owners).collect())
}

/// Returns an owner for each size: the largest first, each to the rank with the least so far, the first of several. The
/// largest sum is at most 4/3 of the least possible (Graham, "Bounds on multiprocessing timing anomalies", 1969).
fn balanced(sizes: &[usize], num_ranks: usize) -> Vec<usize> {
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
    use super::balanced;

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
    fn owners_of_large_models_hold_nearly_the_same() {
        for num_ranks in [2, 3, 4, 8, 16, 32] {
            for sizes in [gpt_13b(), llama_70b()] {
                let ratio = largest_over_mean(&sizes, num_ranks);
                assert!(ratio <= 1.15, "{ratio} on {num_ranks} ranks");
            }
        }
    }

    #[test]
    fn equal_sizes_go_round_and_few_leave_ranks_without() {
        assert_eq!(balanced(&[5, 5, 5, 5], 2), [0, 1, 0, 1]);
        assert_eq!(balanced(&[1, 9, 4], 4), [2, 0, 1]);
        assert_eq!(balanced(&[3, 4], 1), [0, 0]);
    }
}
