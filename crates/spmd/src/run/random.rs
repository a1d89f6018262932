//! Random numbers from a seed. With placements, they do not depend on how the ranks split a tensor.

use burn::tensor::{DType, Distribution, TensorData, bf16, f16};
use burn_backend::Element;
use burn_ir::{OperationIr, RandomOpIr};
use burn_std::rand::{SeedableRng, StdRng};

use crate::graph::{Draw, random_of};

/// Number of elements of the whole tensor that one generator draws.
const BLOCK: usize = 256;

/// The step and micro-batch of a run, which determine its random numbers along with the seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Moment {
    /// Number of the step.
    pub(super) step: u64,
    /// Number of the micro-batch in it.
    pub(super) micro: u32,
}

/// The numbers that one rank draws.
pub(super) struct Drawing<'a> {
    draw: &'a Draw,
    moment: Moment,
    rank: usize,
    /// The start of the rank's part in the whole tensor, in each dim.
    start: Vec<usize>,
}

impl<'a> Drawing<'a> {
    /// Creates the drawing of a rank, where `along` returns its index along a mesh axis.
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

    /// Returns the rank's part of the numbers that an operation draws.
    pub(super) fn of(&self, operation: &OperationIr) -> Result<TensorData, String> {
        let op = random_of(operation).ok_or("it draws no random numbers")?;
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
                "numbers of type {other:?} cannot be drawn from a seed"
            )),
        }
    }

    /// Draws the blocks of consecutive elements that overlap the part. Each block has its own generator, so a rank
    /// draws few numbers outside of its part.
    fn part<E: Element>(&self, op: &RandomOpIr) -> Result<TensorData, String> {
        let (whole, part) = (&self.draw.whole, op.out.shape.to_vec());
        let fits = |((size, start), whole): ((&usize, &usize), &usize)| size + start <= *whole;
        let mut dims = part.iter().zip(&self.start).zip(whole);
        if part.len() != whole.len() || !dims.all(fits) {
            return Err(format!("a rank's {part:?} is not part of {whole:?}"));
        }
        let Some((width, rows)) = part.split_last() else {
            return Err("it has no dims".to_owned());
        };
        let len: usize = whole.iter().product();
        let mut elements: Vec<E> = Vec::with_capacity(part.iter().product());
        let mut block: (usize, Vec<E>) = (usize::MAX, Vec::new());
        for row in 0..rows.iter().product::<usize>() {
            let first = self.place(row, rows);
            let (mut at, end) = (first, first + width);
            while at < end {
                let (number, from) = (at / BLOCK, at % BLOCK);
                if block.0 != number {
                    let num = BLOCK.min(len - number * BLOCK);
                    let mut generator = self.generator(number);
                    block = (number, drawn(num, op.distribution, &mut generator)?);
                }
                let to = block.1.len().min(from + end - at);
                elements.extend(&block.1[from..to]);
                at += to - from;
            }
        }
        Ok(TensorData::new(elements, part))
    }

    /// Returns the row-major position in the whole tensor of the first element of a row of the part.
    fn place(&self, row: usize, rows: &[usize]) -> usize {
        let Some((width, dims)) = self.draw.whole.split_last() else {
            return 0;
        };
        let (mut row, mut place, mut stride) = (row, self.start[rows.len()], *width);
        for ((size, start), whole) in rows.iter().zip(&self.start).zip(dims).rev() {
            place += (row % size + start) * stride;
            row /= size;
            stride *= whole;
        }
        place
    }

    /// Returns the generator of a block. The key contains everything that distinguishes the block, so all keys differ:
    /// a step's number has 64 bits, a block's 48, a rank's 16.
    fn generator(&self, block: usize) -> StdRng {
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
            rank << 48 | block as u64,
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
