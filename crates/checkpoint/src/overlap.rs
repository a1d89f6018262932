//! Overlaps of two regions of one tensor.

use std::ops::Range;

use burn_fsdp_mesh::Region;

/// A region divided into runs of elements that are contiguous in the whole tensor, in the tensor's order.
///
/// All runs have the same length. A run is computed from its index, so even a region of very many runs costs no memory.
#[derive(Debug, Clone)]
pub(crate) struct Runs {
    /// The first element of the first run.
    base: usize,
    /// Number of elements in each run.
    run_len: usize,
    num_runs: usize,
    /// The dims along which runs repeat: `(count, elements from one run to the next)`.
    dims: Vec<(usize, usize)>,
}

impl Runs {
    /// Divides a region into runs. It must have passed [`Region::check`] for the shape.
    pub(crate) fn new(region: &Region, shape: &[usize]) -> Self {
        match region {
            Region::Flat(range) => Self {
                base: range.start,
                run_len: range.len(),
                num_runs: usize::from(!range.is_empty()),
                dims: Vec::new(),
            },
            Region::Box { sizes, .. } if sizes.contains(&0) => Self {
                base: 0,
                run_len: 0,
                num_runs: 0,
                dims: Vec::new(),
            },
            Region::Box { offsets, sizes } => {
                let mut stride = 1;
                let mut base = 0;
                let mut run_len = 1;
                let mut dims = Vec::new();
                // A dim extends the run as long as all later dims are whole.
                let mut is_run = true;
                for dim in (0..shape.len()).rev() {
                    base += offsets[dim] * stride;
                    if is_run {
                        run_len *= sizes[dim]
                    } else {
                        dims.push((sizes[dim], stride))
                    }
                    is_run &= sizes[dim] == shape[dim];
                    stride *= shape[dim];
                }
                dims.reverse();
                Self {
                    base,
                    run_len,
                    num_runs: dims.iter().map(|(number, _)| number).product(),
                    dims,
                }
            }
        }
    }

    /// Returns the elements of the run with this index, counted in the whole tensor.
    fn run(&self, index: usize) -> Range<usize> {
        let mut rest = index;
        let mut start = self.base;
        for (number, stride) in self.dims.iter().rev() {
            start += rest % number * stride;
            rest /= number;
        }
        start..start + self.run_len
    }

    /// Returns the first run at or after `from` that ends after `element`.
    fn seek(&self, from: usize, element: usize) -> usize {
        let (mut low, mut high) = (from, self.num_runs);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.run(middle).end > element {
                high = middle
            } else {
                low = middle + 1
            }
        }
        low
    }
}

/// A stretch of elements that is in two regions of one tensor and contiguous in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// The first shared element, counted in the first region.
    pub(crate) from: usize,
    /// The first shared element, counted in the second region.
    pub(crate) to: usize,
    /// Number of shared elements.
    pub(crate) len: usize,
}

/// Lists the overlaps of two regions, in ascending order in both regions. Each overlap is as long as possible.
pub(crate) fn overlaps(from: Runs, to: Runs) -> impl Iterator<Item = Overlap> {
    let mut pieces = Overlaps {
        from,
        to,
        from_run: 0,
        to_run: 0,
    };
    let mut pending: Option<Overlap> = None;
    std::iter::from_fn(move || {
        loop {
            let next = pieces.next();
            match (&mut pending, next) {
                (Some(last), Some(next))
                    if last.from + last.len == next.from && last.to + last.len == next.to =>
                {
                    last.len += next.len;
                }
                (None, None) => return None,
                (_, next) => {
                    if let Some(done) = std::mem::replace(&mut pending, next) {
                        return Some(done);
                    }
                }
            }
        }
    })
}

struct Overlaps {
    from: Runs,
    to: Runs,
    from_run: usize,
    to_run: usize,
}

impl Iterator for Overlaps {
    type Item = Overlap;

    fn next(&mut self) -> Option<Overlap> {
        while self.from_run < self.from.num_runs && self.to_run < self.to.num_runs {
            let from = self.from.run(self.from_run);
            let to = self.to.run(self.to_run);
            if from.end <= to.start {
                self.from_run = self.from.seek(self.from_run + 1, to.start);
                continue;
            }
            if to.end <= from.start {
                self.to_run = self.to.seek(self.to_run + 1, from.start);
                continue;
            }
            let start = from.start.max(to.start);
            let end = from.end.min(to.end);
            let overlap = Overlap {
                from: self.from_run * self.from.run_len + (start - from.start),
                to: self.to_run * self.to.run_len + (start - to.start),
                len: end - start,
            };
            self.from_run += usize::from(from.end == end);
            self.to_run += usize::from(to.end == end);
            return Some(overlap);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use burn_fsdp_mesh::num_elements;

    use super::*;

    /// Lists every element of a region, in order, directly from the definition.
    fn elements(region: &Region, shape: &[usize]) -> Vec<usize> {
        let total = num_elements(shape).expect("small");
        let inside = |element: &usize| match region {
            Region::Flat(range) => range.contains(element),
            Region::Box { offsets, sizes } => {
                let mut rest = *element;
                (0..shape.len()).rev().all(|dim| {
                    let index = rest % shape[dim];
                    rest /= shape[dim];
                    (offsets[dim]..offsets[dim] + sizes[dim]).contains(&index)
                })
            }
        };
        (0..total).filter(inside).collect()
    }

    fn regions(shape: &[usize]) -> Vec<Region> {
        let total = num_elements(shape).expect("small");
        let mut all = vec![Region::whole(shape)];
        for start in [0, 1, total / 3] {
            for end in [start, total / 2, total] {
                if start <= end && end <= total {
                    all.push(Region::Flat(start..end));
                }
            }
        }
        let mut boxes = vec![(Vec::new(), Vec::new())];
        for full in shape {
            boxes = boxes
                .into_iter()
                .flat_map(|(offsets, sizes): (Vec<usize>, Vec<usize>)| {
                    let choices = [(0, *full), (0, full / 2), (full / 2, full - full / 2)];
                    choices.map(|(offset, size)| {
                        let offsets = [offsets.clone(), vec![offset]].concat();
                        (offsets, [sizes.clone(), vec![size]].concat())
                    })
                })
                .collect();
        }
        all.extend(
            boxes
                .into_iter()
                .map(|(offsets, sizes)| Region::Box { offsets, sizes }),
        );
        all
    }

    #[test]
    fn runs_and_overlaps_agree_with_the_definition() {
        for shape in [
            vec![],
            vec![7],
            vec![3, 5],
            vec![2, 3, 4],
            vec![2, 1, 3, 2],
            vec![3, 0, 2],
        ] {
            let regions = regions(&shape);
            for from in &regions {
                from.check(&shape).expect("inside");
                let from_elements = elements(from, &shape);
                assert_eq!(from.len(), from_elements.len(), "{from} of {shape:?}");
                for to in &regions {
                    let to_elements = elements(to, &shape);
                    let mut found = Vec::new();
                    let mut previous: Option<Overlap> = None;
                    for piece in overlaps(Runs::new(from, &shape), Runs::new(to, &shape)) {
                        for i in 0..piece.len {
                            assert_eq!(from_elements[piece.from + i], to_elements[piece.to + i]);
                            found.push(to_elements[piece.to + i]);
                        }
                        if let Some(last) = previous {
                            let joins = last.from + last.len == piece.from
                                && last.to + last.len == piece.to;
                            assert!(!joins, "two pieces that could be one");
                        }
                        previous = Some(piece);
                    }
                    let mut shared = to_elements.clone();
                    shared.retain(|element| from_elements.contains(element));
                    assert_eq!(found, shared, "{from} and {to} of {shape:?}");
                }
            }
        }
    }

    #[test]
    fn a_region_of_very_many_runs_is_searched_not_walked() {
        let shape = [1 << 40, 4];
        let column = Region::Box {
            offsets: vec![0, 1],
            sizes: vec![1 << 40, 1],
        };
        let end = 4 << 40;
        let last = Region::Flat(end - 8..end);
        let found: Vec<_> =
            overlaps(Runs::new(&column, &shape), Runs::new(&last, &shape)).collect();
        let first = (1 << 40) - 2;
        assert_eq!(
            found,
            [
                Overlap {
                    from: first,
                    to: 1,
                    len: 1
                },
                Overlap {
                    from: first + 1,
                    to: 5,
                    len: 1
                }
            ]
        );
    }
}
