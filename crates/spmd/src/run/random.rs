//! Random numbers from a seed: the same elements, however the ranks divide the whole.

use burn::tensor::{DType, Distribution, TensorData, bf16, f16};
use burn_backend::Element;
use burn_ir::{OperationIr, RandomOpIr};
use burn_std::rand::{SeedableRng, StdRng};

use crate::graph::{Draw, random_of};

/// The step and micro-batch of a run, which key its random numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Moment {
    /// Number of the step.
    pub(super) step: u64,
    /// Number of the micro-batch in it.
    pub(super) micro: u32,
}

/// What one rank draws.
pub(super) struct Drawing<'a> {
    draw: &'a Draw,
    moment: Moment,
    rank: usize,
    /// Where the rank's part of the whole begins, in each dim.
    start: Vec<usize>,
}

impl<'a> Drawing<'a> {
    /// Creates what a rank draws that is at `along` of each mesh axis.
    pub(super) fn new(
        draw: &'a Draw,
        moment: Moment,
        rank: usize,
        along: impl Fn(&str) -> Result<usize, String>,
    ) -> Result<Self, String> {
        let start = draw.start(along)?;
        Ok(Self {
            draw,
            moment,
            rank,
            start,
        })
    }

    /// Returns the rank's part of what an operation draws.
    pub(super) fn of(&self, operation: &OperationIr) -> Result<TensorData, String> {
        let op = random_of(operation).ok_or("it draws nothing")?;
        match op.out.dtype {
            DType::F64 => self.part::<f64>(op),
            DType::F32 => self.part::<f32>(op),
            DType::F16 => self.part::<f16>(op),
            DType::BF16 => self.part::<bf16>(op),
            DType::I64 => self.part::<i64>(op),
            DType::I32 => self.part::<i32>(op),
            DType::I16 => self.part::<i16>(op),
            DType::I8 => self.part::<i8>(op),
            DType::U64 => self.part::<u64>(op),
            DType::U32 => self.part::<u32>(op),
            DType::U16 => self.part::<u16>(op),
            DType::U8 => self.part::<u8>(op),
            other => Err(format!(
                "no numbers of type {other:?} are drawn from a seed"
            )),
        }
    }

    /// Draws each row of the part, along the last dim, from a generator of its own, and takes the rank's elements of it: so
    /// no rank draws the rows of others.
    fn part<E: Element>(&self, op: &RandomOpIr) -> Result<TensorData, String> {
        let (whole, part) = (&self.draw.whole, op.out.shape.to_vec());
        let fits = |((size, start), whole): ((&usize, &usize), &usize)| size + start <= *whole;
        let mut dims = part.iter().zip(&self.start).zip(whole);
        if part.len() != whole.len() || !dims.all(fits) {
            return Err(format!("a rank's {part:?} is no part of {whole:?}"));
        }
        let (Some((width, rows)), Some(full_width)) = (part.split_last(), whole.last()) else {
            return Err("it has no dims".to_owned());
        };
        let from = self.start[rows.len()];
        let distribution = op.distribution;
        let mut elements: Vec<E> = Vec::with_capacity(part.iter().product());
        for row in 0..rows.iter().product::<usize>() {
            let mut generator = self.generator(self.place(row, rows));
            let drawn = drawn::<E>(*full_width, distribution, &mut generator)?;
            elements.extend(&drawn[from..from + width]);
        }
        Ok(TensorData::new(elements, part))
    }

    /// Returns the number that a row of the part has among those of the whole.
    fn place(&self, row: usize, rows: &[usize]) -> usize {
        let (mut row, mut place, mut stride) = (row, 0, 1);
        for (dim, size) in rows.iter().enumerate().rev() {
            place += (row % size + self.start[dim]) * stride;
            row /= size;
            stride *= self.draw.whole[dim];
        }
        place
    }

    /// Returns the generator of a row. All that distinguishes it is in the key, so that no two are alike: a step's number has
    /// 64 bits, a row's 48, a rank's 16.
    fn generator(&self, row: usize) -> StdRng {
        let Draw {
            seed,
            number,
            is_own,
            ..
        } = self.draw;
        let Moment { step, micro } = self.moment;
        let rank = if *is_own { self.rank as u64 } else { 0 };
        let words = [
            *seed,
            step,
            u64::from(*number) << 32 | u64::from(micro),
            rank << 48 | row as u64,
        ];
        let mut key = [0; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        StdRng::from_seed(key)
    }
}

fn drawn<E: Element>(
    num: usize,
    distribution: Distribution,
    generator: &mut StdRng,
) -> Result<Vec<E>, String> {
    let data = TensorData::random::<E, _, _>([num], distribution, generator);
    data.try_into_vec().map_err(|error| error.to_string())
}
