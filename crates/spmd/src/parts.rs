//! Conversion of host tensors between whole tensors and the ranks' parts.

use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_fsdp_collectives::{
    Buffer, BufferPool, ElementType, FullPart, Part, Pending, ProcessGroup, Source,
};
use burn_fsdp_mesh::{Cut, Layout, Partition, Placement};
use burn_fsdp_tensors::{self as tensors, reduced_type};

use crate::error::Error;
use crate::ranks::Ranks;

/// A tensor that is divided among the ranks.
pub(crate) struct Divided<'a> {
    /// Shape of the whole tensor.
    pub(crate) shape: &'a [usize],
    /// Layout of the tensor on the mesh of the ranks.
    pub(crate) layout: &'a Layout,
    /// The ranks.
    pub(crate) ranks: &'a Ranks,
}

impl Divided<'_> {
    /// Returns the partition of the elements, or `None` if the tensor is whole or cut along dims.
    pub(crate) fn partition(&self) -> Result<Option<Partition>, Error> {
        if self.layout.is_whole() || self.layout.cut == Cut::Dims {
            return Ok(None);
        }
        let num_elements = self.shape.iter().product();
        Ok(self
            .layout
            .partition(num_elements, self.flat_group()?.size())?)
    }

    /// Returns the shape in which the executor stores this rank's part of the partition. All flat shards have the same
    /// length. A value with one owner has its full shape on the owner, and is empty on other ranks.
    pub(crate) fn held_shape(&self, partition: Partition) -> Result<Vec<usize>, Error> {
        match self.layout.owner {
            Some(_) => self.part_shape(),
            None => Ok(vec![partition.chunk_len()]),
        }
    }

    /// Returns the group of ranks that each hold one flat shard.
    pub(crate) fn flat_group(&self) -> Result<&ProcessGroup, Error> {
        let cut = self.cuts()?.into_iter().next();
        Ok(cut.map_or(self.ranks.group(), |(_, group)| group))
    }

    /// Returns the groups of ranks that hold the same part, one for each axis that does not cut the tensor.
    pub(crate) fn copies(&self) -> Result<Vec<&ProcessGroup>, Error> {
        let mesh = self.ranks.mesh()?;
        let axes = self.layout.placements.iter().zip(mesh.axes());
        let whole = axes.filter(|(placement, _)| !matches!(placement, Placement::Shard(_)));
        whole
            .map(|(_, axis)| self.ranks.along(&axis.name))
            .collect()
    }

    /// Returns each cut dim with the group of ranks over which it is cut, slowest axis first.
    fn cuts(&self) -> Result<Vec<(usize, &ProcessGroup)>, Error> {
        let mesh = self.ranks.mesh()?;
        let axes = self.layout.placements.iter().zip(mesh.axes());
        let cuts = axes.filter_map(|(placement, axis)| match placement {
            Placement::Shard(dim) => Some(self.ranks.along(&axis.name).map(|group| (*dim, group))),
            _ => None,
        });
        cuts.collect()
    }

    /// Copies this rank's part from the whole tensor, and pads it.
    pub(crate) fn localize(&self, data: &TensorData) -> Result<TensorData, Error> {
        if let Some(partition) = self.partition()? {
            let part = slice(data, partition.range(self.flat_group()?.rank()));
            return self.padded(part);
        }
        let mut part = None;
        for (dim, group) in self.cuts()? {
            let of = part.as_ref().unwrap_or(data);
            part = Some(part_along(of, dim, group.size(), group.rank()));
        }
        Ok(part.unwrap_or_else(|| {
            let bytes = data.as_bytes().to_vec();
            TensorData::from_bytes_vec(bytes, data.shape().to_vec(), data.dtype())
        }))
    }

    /// Gathers the whole tensor from the ranks' parts. All ranks must call it.
    pub(crate) fn whole(&self, path: &str, local: &TensorData) -> Result<TensorData, Error> {
        if let Some(partition) = self.partition()? {
            return gather(self.flat_group()?, path, local, partition, self.shape);
        }
        let mut joined = local.clone();
        for (dim, group) in self.cuts()? {
            let num_elements = joined.num_elements() * group.size();
            let partition = Partition::flat(num_elements, group.size())?;
            let all = gather(group, path, &joined, partition, &[num_elements])?;
            joined = join_along(all.as_bytes(), &joined, dim, group.size());
        }
        Ok(resized(joined, self.shape))
    }

    /// Converts this rank's padded part to another layout. If the layouts differ, this gathers the whole tensor
    /// temporarily, so all ranks must call it.
    pub(crate) fn relaid(
        &self,
        path: &str,
        local: TensorData,
        layout: &Layout,
    ) -> Result<TensorData, Error> {
        if self.layout == layout || self.layout.is_whole() && layout.is_whole() {
            return Ok(local);
        }
        let whole = self.whole(path, &local)?;
        drop(local);
        let (shape, ranks) = (self.shape, self.ranks);
        let into = Divided {
            shape,
            layout,
            ranks,
        };
        into.localize(&whole)
    }

    /// Pads a part to the shape in which the executor stores it.
    pub(crate) fn padded(&self, data: TensorData) -> Result<TensorData, Error> {
        let Some(partition) = self.partition()? else {
            let mut shape = self.shape.to_vec();
            for (dim, group) in self.cuts()? {
                shape[dim] = shape[dim].div_ceil(group.size());
            }
            return Ok(resized(data, &shape));
        };
        let dtype = data.dtype();
        let shape = self.held_shape(partition)?;
        let mut bytes = data.as_bytes().to_vec();
        bytes.resize(shape.iter().product::<usize>() * dtype.size(), 0);
        Ok(TensorData::from_bytes_vec(bytes, shape, dtype))
    }

    /// Removes the padding from a part.
    pub(crate) fn unpadded(&self, data: TensorData) -> Result<TensorData, Error> {
        Ok(match self.partition()? {
            Some(_) if self.layout.owner.is_some() => data,
            Some(partition) => slice(&data, 0..partition.len(self.flat_group()?.rank())),
            None => resized(data, &self.part_shape()?),
        })
    }

    /// Returns the shape of this rank's part, without padding.
    pub(crate) fn part_shape(&self) -> Result<Vec<usize>, Error> {
        let (mesh, rank) = (self.ranks.mesh()?, self.ranks.rank());
        Ok(self.layout.part_shape(self.shape, &mesh, rank)?)
    }
}

/// Returns part `index` of `num_parts` along a dim, padded with zeros beyond the end of the tensor.
fn part_along(data: &TensorData, dim: usize, num_parts: usize, index: usize) -> TensorData {
    let mut shape = data.shape().to_vec();
    let whole = shape[dim];
    shape[dim] = whole.div_ceil(num_parts);
    let inner: usize = shape[dim + 1..].iter().product::<usize>() * data.dtype().size();
    let (row, part) = (whole * inner, shape[dim] * inner);
    let (start, end) = ((index * part).min(row), ((index + 1) * part).min(row));
    let rows = data.as_bytes().chunks_exact(row.max(1));
    let padding = std::iter::repeat_n(0, part - (end - start));
    let bytes = rows.flat_map(|row| row[start..end].iter().copied().chain(padding.clone()));
    TensorData::from_bytes_vec(bytes.collect(), shape, data.dtype())
}

/// Truncates each dim of a tensor, or extends it with zeros, to the size in `shape`.
fn resized(data: TensorData, shape: &[usize]) -> TensorData {
    let from = data.shape().to_vec();
    // A different number of dims is rejected where the tensor is used.
    if from == shape || from.len() != shape.len() {
        return data;
    }
    let size = data.dtype().size();
    let mut bytes = vec![0; shape.iter().product::<usize>() * size];
    let common: Vec<usize> = from.iter().zip(shape).map(|(a, b)| *a.min(b)).collect();
    let inner = common.last().copied().unwrap_or(1);
    let rows = &common[..common.len().saturating_sub(1)];
    let mut index = vec![0; rows.len()];
    let start = |index: &[usize], of: &[usize]| {
        let outer = index
            .iter()
            .zip(of)
            .fold(0, |at, (index, size)| at * size + index);
        outer * of.last().copied().unwrap_or(1) * size
    };
    for _ in 0..rows.iter().product::<usize>() {
        let (read, write) = (start(&index, &from), start(&index, shape));
        bytes[write..write + inner * size]
            .copy_from_slice(&data.as_bytes()[read..][..inner * size]);
        for (at, size) in index.iter_mut().zip(rows).rev() {
            *at = (*at + 1) % size;
            if *at > 0 {
                break;
            }
        }
    }
    TensorData::from_bytes_vec(bytes, shape.to_vec(), data.dtype())
}

/// Joins the parts of all ranks along a dim. `bytes` holds them one after the other, and `part` is one of them.
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

pub(crate) fn slice(data: &TensorData, range: std::ops::Range<usize>) -> TensorData {
    let size = data.dtype().size();
    let bytes = data.as_bytes()[range.start * size..range.end * size].to_vec();
    TensorData::from_bytes_vec(bytes, [range.len()], data.dtype())
}

/// Gathers the whole tensor from the flat padded shards of all ranks. The memory does not come from the shared pool,
/// which would retain it.
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
    let into = BufferPool::new().take(partition.num_elements() * dtype.size());
    let part = Part::new(source, partition, element);
    let received = group
        .all_gather(format!("read {path}"), Vec::new(), vec![part], vec![into])
        .map_err(Error::among_ranks)?;
    first_of(received.buffers, shape, dtype)
}

/// Converts the only received buffer to a tensor without copying it.
fn first_of(buffers: Vec<Buffer>, shape: &[usize], dtype: DType) -> Result<TensorData, Error> {
    let buffer = buffers.into_iter().next();
    let buffer =
        buffer.ok_or_else(|| Error::Internal("a collective returned no buffer".to_owned()))?;
    Ok(tensors::data(buffer, shape.to_vec(), dtype))
}

pub(crate) fn element_of(path: &str, dtype: DType) -> Result<ElementType, Error> {
    reduced_type(dtype).ok_or_else(|| Error::ElementType {
        path: path.to_owned(),
        dtype,
    })
}

/// Sends the data of the group's rank 0 to all its ranks, and returns it on each.
pub(crate) fn broadcast(
    group: &ProcessGroup,
    path: &str,
    data: Option<TensorData>,
    (shape, dtype): (&[usize], DType),
) -> Result<Arc<TensorData>, Error> {
    let num_bytes = shape.iter().product::<usize>() * dtype.size();
    let bytes = ElementType::U8;
    let label = format!("initial {path}");
    let own = data.map(Arc::new);
    let (parts, into) = match &own {
        Some(own) => (
            vec![FullPart::new(tensors::data_source(own.clone()), bytes)],
            vec![],
        ),
        None => (
            vec![FullPart::absent(num_bytes, bytes)],
            vec![BufferPool::new().take(num_bytes)],
        ),
    };
    // Waits until the other ranks have read the data, because the next value must not be created before then.
    let received = group
        .start_broadcast(label, Vec::new(), 0, parts, into)
        .and_then(Pending::wait_released)
        .map_err(Error::among_ranks)?;
    match own {
        Some(own) => Ok(own),
        None => first_of(received.buffers, shape, dtype).map(Arc::new),
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
        for (num_parts, dim) in [(4, 0), (4, 1), (5, 1), (7, 1), (3, 2)] {
            let parts: Vec<_> = (0..num_parts)
                .map(|index| part_along(&whole, dim, num_parts, index))
                .collect();
            let bytes: Vec<u8> = parts
                .iter()
                .flat_map(|part| part.as_bytes().to_vec())
                .collect();
            let joined = join_along(&bytes, &parts[0], dim, num_parts);
            assert_eq!(
                resized(joined, &[2, 6, 2]),
                whole,
                "{num_parts} parts of dim {dim}"
            );
        }
        let last = part_along(&whole, 1, 4, 2);
        assert_eq!(
            last.try_to_vec::<i32>().unwrap(),
            [8, 9, 10, 11, 20, 21, 22, 23]
        );
        let nothing = part_along(&whole, 1, 4, 3);
        assert_eq!(nothing.try_to_vec::<i32>().unwrap(), [0; 8]);
        let padded = resized(resized(last, &[1, 1, 2]), &[2, 2, 3]);
        assert_eq!(
            padded.try_to_vec::<i32>().unwrap(),
            [8, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        let middle = part_along(&whole, 1, 3, 1);
        assert_eq!(
            middle.try_to_vec::<i32>().unwrap(),
            [4, 5, 6, 7, 16, 17, 18, 19]
        );
    }
}
