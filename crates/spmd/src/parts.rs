//! Tensors on the host: from wholes to the parts that ranks hold, and back.

use burn::tensor::{DType, TensorData};
use burn_fsdp_collectives::{ElementType, FullPart, Part, ProcessGroup, Source};
use burn_fsdp_mesh::{Partition, Placement};

use crate::elements::element_type;
use crate::error::Error;
use crate::graph::{ParameterLayout, local_shape};
use crate::ranks::Ranks;

/// The part of a whole tensor that a rank holds, padded.
pub(crate) fn localize(
    data: &TensorData,
    layout: &ParameterLayout,
    ranks: &Ranks,
) -> Result<TensorData, Error> {
    Ok(match layout {
        ParameterLayout::Whole => data.clone(),
        ParameterLayout::Flat(partition) => {
            let size = data.dtype().size();
            let range = partition.range(ranks.rank());
            let mut bytes = data.as_bytes()[range.start * size..range.end * size].to_vec();
            bytes.resize(partition.chunk_len() * size, 0);
            TensorData::from_bytes_vec(bytes, [partition.chunk_len()], data.dtype())
        }
        ParameterLayout::Placed(placements) => {
            let mut part = data.clone();
            for axis in placements.iter() {
                if let Placement::Shard(dim) = axis.placement {
                    let index = ranks.along(&axis.axis)?.rank();
                    part = part_along(&part, dim, axis.num_ranks, index);
                }
            }
            part
        }
    })
}

/// Part `index` of `num_parts` along a dim.
fn part_along(data: &TensorData, dim: usize, num_parts: usize, index: usize) -> TensorData {
    let mut shape = data.shape().to_vec();
    let whole = shape[dim];
    shape[dim] /= num_parts;
    let inner: usize = shape[dim + 1..].iter().product::<usize>() * data.dtype().size();
    let (row, part) = (whole * inner, shape[dim] * inner);
    let rows = data.as_bytes().chunks_exact(row.max(1));
    let bytes = rows.flat_map(|row| row[index * part..(index + 1) * part].iter().copied());
    TensorData::from_bytes_vec(bytes.collect(), shape, data.dtype())
}

/// The parts of all ranks, one after the other in `bytes`, side by side along a dim.
fn join_along(bytes: &[u8], part: &TensorData, dim: usize, num_parts: usize) -> TensorData {
    let mut shape = part.shape().to_vec();
    let inner: usize = shape[dim..].iter().product::<usize>() * part.dtype().size();
    let num_rows: usize = shape[..dim].iter().product();
    let len = part.as_bytes().len();
    let mut joined = Vec::with_capacity(bytes.len());
    for row in 0..num_rows {
        for index in 0..num_parts {
            let start = index * len + row * inner;
            joined.extend_from_slice(&bytes[start..start + inner]);
        }
    }
    shape[dim] *= num_parts;
    TensorData::from_bytes_vec(joined, shape, part.dtype())
}

/// The whole of which this rank has a part. All ranks must call it.
pub(crate) fn whole(
    ranks: &Ranks,
    path: &str,
    local: &TensorData,
    layout: &ParameterLayout,
    shape: &[usize],
) -> Result<TensorData, Error> {
    match layout {
        ParameterLayout::Whole => Ok(local.clone()),
        ParameterLayout::Flat(partition) => gather(ranks.group(), path, local, *partition, shape),
        ParameterLayout::Placed(placements) => {
            let mut joined = local.clone();
            for axis in placements.iter() {
                if let Placement::Shard(dim) = axis.placement {
                    let group = ranks.along(&axis.axis)?;
                    let num_elements = joined.num_elements() * axis.num_ranks;
                    let partition = Partition::flat(num_elements, axis.num_ranks)?;
                    let all = gather(group, path, &joined, partition, &[num_elements])?;
                    joined = join_along(all.as_bytes(), &joined, dim, axis.num_ranks);
                }
            }
            Ok(joined)
        }
    }
}

pub(crate) fn slice(data: &TensorData, range: std::ops::Range<usize>) -> TensorData {
    let size = data.dtype().size();
    let bytes = data.as_bytes()[range.start * size..range.end * size].to_vec();
    TensorData::from_bytes_vec(bytes, [range.len()], data.dtype())
}

/// The whole of which every rank has a flat padded shard.
fn gather(
    group: &ProcessGroup,
    path: &str,
    local: &TensorData,
    partition: Partition,
    shape: &[usize],
) -> Result<TensorData, Error> {
    let dtype = local.dtype();
    let element = element_of(path, dtype)?;
    let own = partition.len(group.rank()) * dtype.size();
    let source = Source::new(local.as_bytes()[..own].to_vec());
    let into = group.pool().take(partition.num_elements() * dtype.size());
    let part = Part::new(source, partition, element);
    let received = group
        .all_gather(format!("read {path}"), Vec::new(), vec![part], vec![into])
        .map_err(Error::among_ranks)?;
    let bytes = received.buffers[0].as_ref().to_vec();
    Ok(TensorData::from_bytes_vec(bytes, shape.to_vec(), dtype))
}

pub(crate) fn element_of(path: &str, dtype: DType) -> Result<ElementType, Error> {
    element_type(dtype).ok_or_else(|| Error::ElementType {
        path: path.to_owned(),
        dtype,
    })
}

/// What rank 0 has, on all ranks.
pub(crate) fn broadcast(
    group: &ProcessGroup,
    path: &str,
    data: Option<TensorData>,
    (shape, dtype): (&[usize], DType),
) -> Result<TensorData, Error> {
    let num_bytes = shape.iter().product::<usize>() * dtype.size();
    let bytes = ElementType::U8;
    let label = format!("initial {path}");
    let (parts, into) = match &data {
        Some(data) => (
            vec![FullPart::new(Source::new(data.as_bytes().to_vec()), bytes)],
            vec![],
        ),
        None => (
            vec![FullPart::absent(num_bytes, bytes)],
            vec![group.pool().take(num_bytes)],
        ),
    };
    let received = group
        .broadcast(label, Vec::new(), 0, parts, into)
        .map_err(Error::among_ranks)?;
    match data {
        Some(data) => Ok(data),
        None => {
            let bytes = received.buffers[0].as_ref().to_vec();
            Ok(TensorData::from_bytes_vec(bytes, shape.to_vec(), dtype))
        }
    }
}

/// A part as tensors hold it.
pub(crate) fn padded(data: TensorData, layout: &ParameterLayout) -> TensorData {
    match layout {
        ParameterLayout::Whole | ParameterLayout::Placed(_) => data,
        ParameterLayout::Flat(partition) => {
            let dtype = data.dtype();
            let mut bytes = data.as_bytes().to_vec();
            bytes.resize(partition.chunk_len() * dtype.size(), 0);
            TensorData::from_bytes_vec(bytes, [partition.chunk_len()], dtype)
        }
    }
}

/// A part without its padding.
pub(crate) fn unpadded(data: TensorData, layout: &ParameterLayout, ranks: &Ranks) -> TensorData {
    match layout {
        ParameterLayout::Whole | ParameterLayout::Placed(_) => data,
        ParameterLayout::Flat(partition) => slice(&data, 0..partition.len(ranks.rank())),
    }
}

/// Shape of this rank's part of a tensor, without padding.
pub(crate) fn part_shape(shape: &[usize], layout: &ParameterLayout, ranks: &Ranks) -> Vec<usize> {
    match layout {
        ParameterLayout::Whole => shape.to_vec(),
        ParameterLayout::Flat(partition) => vec![partition.len(ranks.rank())],
        ParameterLayout::Placed(placements) => local_shape(shape, placements),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_joined_again_are_the_whole() {
        let whole = TensorData::new((0..24).collect::<Vec<i32>>(), [2, 6, 2]);
        for dim in 0..3 {
            let parts: Vec<_> = (0..2)
                .map(|index| part_along(&whole, dim, 2, index))
                .collect();
            let bytes: Vec<u8> = parts
                .iter()
                .flat_map(|part| part.as_bytes().to_vec())
                .collect();
            assert_eq!(join_along(&bytes, &parts[0], dim, 2), whole);
        }
        let middle = part_along(&whole, 1, 3, 1);
        assert_eq!(
            middle.try_to_vec::<i32>().unwrap(),
            [4, 5, 6, 7, 16, 17, 18, 19]
        );
    }
}
