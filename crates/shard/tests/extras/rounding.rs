//! The values of a base in 8 or 4 bits, as plain Rust rounds them by the formulas of the documentation.

/// The levels of the QLoRA paper, appendix E.
#[allow(clippy::excessive_precision, reason = "the digits of the paper")]
pub(crate) const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// Returns the elements of a matrix in 8 or 4 bits: in blocks of 64 elements of the whole
/// matrix, each element is the nearest level times the largest magnitude of its block.
pub(crate) fn rounded(bits: usize, values: &[f32]) -> Vec<f32> {
    let levels: Vec<f32> = match bits {
        4 => NF4.to_vec(),
        _ => (-127..=127).map(|number| number as f32 / 127.0).collect(),
    };
    let mut all = Vec::new();
    for block in values.chunks(64) {
        let largest = block
            .iter()
            .fold(0.0, |most: f32, value| most.max(value.abs()));
        for value in block {
            let part = if largest == 0.0 { 0.0 } else { value / largest };
            let distance = |level: &f32| (f64::from(*level) - f64::from(part)).abs();
            let nearest = levels
                .iter()
                .min_by(|one, other| distance(one).total_cmp(&distance(other)));
            all.push(nearest.expect("levels") * largest);
        }
    }
    all
}
