//! The items of ranks and of one device, and the metrics in the logs of Burn's loop.

use std::path::Path;

/// Returns the items in the order in which `ranks` process them together, with a `batch` of each rank in each
/// step.
pub(crate) fn joined<I: Clone>(items: &[I], ranks: usize, batch: usize) -> Vec<I> {
    let (each, more) = (items.len() / ranks, items.len() % ranks);
    let mut rest = items;
    let parts = (0..ranks).map(|rank| {
        let (part, others) = rest.split_at(each + usize::from(rank < more));
        rest = others;
        part.chunks(batch)
    });
    let mut parts: Vec<_> = parts.collect();
    let mut order = Vec::new();
    loop {
        let step: Vec<I> = parts
            .iter_mut()
            .filter_map(Iterator::next)
            .flatten()
            .cloned()
            .collect();
        if step.is_empty() {
            return order;
        }
        order.extend(step);
    }
}

/// Returns the mean of a metric in its log for an epoch, weighted by the count of each entry.
pub(crate) fn logged(folder: &Path, split: &str, epoch: usize, metric: &str) -> (f64, f64) {
    let file = folder
        .join(split)
        .join(format!("epoch-{epoch}"))
        .join(format!("{metric}.log"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let entries = text
        .lines()
        .filter(|line| !line.contains("final"))
        .map(|line| {
            let (value, count) = line.split_once(',').unwrap_or((line, "1"));
            let number = |text: &str| text.trim().parse::<f64>().expect("a number");
            (number(value), number(count))
        });
    let entries: Vec<_> = entries.collect();
    let counts: f64 = entries.iter().map(|entry| entry.1).sum();
    let sum: f64 = entries.iter().map(|(value, count)| value * count).sum();
    (sum / counts, counts)
}
