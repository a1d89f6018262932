//! The commit protocol; README.md explains why it is correct.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoints::Removal;
use crate::checksum::{BLOCK_BYTES, CHUNK_BYTES, crc32};
use crate::folder_lock::FolderLock;
use crate::folder_name::{Hidden, State, Ticket};
use crate::index::{FORMAT_VERSION, INDEX_FILE, IndexContent, SEAL_FILE, seal};
use crate::shard_header::{self, StoredTensor};
use crate::source::Source;
use crate::storage::{WriteFile, write_synced};
use crate::{
    Assignment, Checkpoints, Checksums, Error, FileEntry, Index, PartEntry, TensorEntry,
    TrainingState, WritePlan,
};

/// What to do if the step already exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Existing {
    /// Fails with [`Error::Exists`]; the step stays unchanged.
    #[default]
    Refuse,
    /// Replaces the step when the new one is complete. The old one must be the folder of a step, which may be damaged.
    /// Anything else is an error and stays unchanged.
    Replace,
}

/// A step that is being saved, held by rank 0: a hidden folder, and the lock against other runs.
///
/// Dropping it without a commit removes the folder.
#[derive(Debug)]
pub struct Staging {
    checkpoints: Checkpoints,
    ticket: Ticket,
    path: PathBuf,
    existing: Existing,
    is_done: bool,
    lock: Option<FolderLock>,
}

/// A rank's record of the file that it has written. Rank 0 needs the receipts of all ranks to commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The rank that wrote the file.
    pub rank: usize,
    ticket: Ticket,
    /// Checksum of the plan, which must be the same on all ranks.
    plan_crc32: u32,
    file: FileEntry,
    /// The range in the file and the checksums of each part, in the order of [`WritePlan::of_rank`].
    parts: Vec<(Range<u64>, Checksums)>,
}

/// A committed step. Other saves remain locked out until this is dropped.
#[derive(Debug)]
pub struct Committed {
    /// Number of the step.
    pub step: u64,
    /// Folder of the step.
    pub path: PathBuf,
    checkpoints: Checkpoints,
    _lock: Option<FolderLock>,
}

impl Staging {
    /// Begins the save of a step, on rank 0. Locks the folder, removes the remains of dead runs, and creates a hidden
    /// folder for the ranks to write into.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`], [`Error::Exists`], [`Error::NotAFolder`], [`Error::NotForSteps`], [`Error::Foreign`],
    /// [`Error::Io`].
    pub fn create(checkpoints: &Checkpoints, step: u64, existing: Existing) -> Result<Self, Error> {
        checkpoints.check_is_for_steps()?;
        let (storage, root) = (checkpoints.storage(), checkpoints.root());
        let made = storage.create_dir_all(root);
        made.map_err(Error::io("create", root))?;
        let lock = checkpoints.lock()?;
        checkpoints.clean()?;
        check_target(checkpoints, step, existing)?;
        let ticket = Ticket(Hidden::new(step, State::Partial));
        let path = checkpoints.hidden_path(&ticket.0);
        let made = storage.create_dir(&path);
        made.map_err(Error::io("create", &path))?;
        Ok(Self {
            checkpoints: checkpoints.clone(),
            ticket,
            path,
            existing,
            is_done: false,
            lock: Some(lock),
        })
    }

    /// Returns the ticket that the other ranks need to write into the same folder.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Publishes the step after every rank has written. The receipts may be in any order.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] unless there is one receipt from each rank for this plan and step; [`Error::Invalid`] if the
    /// ranks' parts do not tile the tensors; [`Error::FileSize`] or [`Error::Io`] if this rank does not see the file
    /// that another rank wrote, for example because they share no file system; [`Error::Exists`], [`Error::NotAFolder`]
    /// or [`Error::Foreign`] if something else has taken the step's name; [`Error::Io`]. After an error, the step does
    /// not exist, and a step that was to be replaced still does. If only the very last sync fails, the step may exist
    /// but may not survive a crash.
    pub fn commit(
        mut self,
        plan: &WritePlan,
        receipts: Vec<Receipt>,
        training: TrainingState,
        model: Value,
    ) -> Result<Committed, Error> {
        if training.step != self.ticket.step() {
            return Err(Error::Argument {
                argument: "training.step",
                expected: self.ticket.step().to_string(),
                got: training.step.to_string(),
            });
        }
        let index = self.index(plan, receipts, training, model)?;
        let storage = self.checkpoints.storage().clone();
        self.check_files(&index)?;
        let index_path = self.path.join(INDEX_FILE);
        let json = index.to_json(&index_path)?;
        // A step whose index cannot be read back must not be committed.
        Index::from_json(&index_path, &json)?;
        write_synced(&*storage, &index_path, &json)?;
        let seal_path = self.path.join(SEAL_FILE);
        write_synced(&*storage, &seal_path, seal(&json).as_bytes())?;
        let synced = storage.sync_dir(&self.path);
        synced.map_err(Error::io("sync", &self.path))?;
        self.publish()?;
        Ok(Committed {
            step: self.ticket.step(),
            path: self.checkpoints.path(self.ticket.step()),
            checkpoints: self.checkpoints.clone(),
            _lock: self.lock.take(),
        })
    }

    /// Publishes the step by a rename, after moving aside the step that it replaces.
    fn publish(&mut self) -> Result<(), Error> {
        let storage = self.checkpoints.storage();
        let root = self.checkpoints.root();
        let step = self.ticket.step();
        let target = self.checkpoints.path(step);
        let mut replaced = None;
        if check_target(&self.checkpoints, step, self.existing)? {
            let hidden = Hidden::new(step, State::Replaced);
            let aside = self.checkpoints.hidden_path(&hidden);
            self.checkpoints.rename(&target, &aside)?;
            replaced = Some(aside);
        }
        if let Err(error) = self.checkpoints.rename(&self.path, &target) {
            if let Some(aside) = &replaced
                && let Err(error) = storage.rename(aside, &target)
            {
                // The next save tries again.
                tracing::error!(path = %aside.display(), %error, "cannot restore the replaced step");
            }
            return Err(error);
        }
        self.is_done = true;
        let synced = storage.sync_dir(root);
        synced.map_err(Error::io("sync", root))?;
        if let Some(aside) = replaced
            && let Err(error) = storage.remove_tree(&aside)
        {
            tracing::warn!(path = %aside.display(), %error, "cannot remove the replaced step");
        }
        Ok(())
    }

    fn index(
        &self,
        plan: &WritePlan,
        receipts: Vec<Receipt>,
        training: TrainingState,
        model: Value,
    ) -> Result<Index, Error> {
        let by_rank = self.receipts_by_rank(plan, receipts)?;
        let entry = |tensor: &crate::TensorSpec| TensorEntry {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            kind: tensor.kind,
            layout: tensor.layout.clone(),
            metadata: tensor.metadata.clone(),
            parts: Vec::new(),
        };
        let mut tensors: Vec<_> = plan.tensors().iter().map(entry).collect();
        let mut files = Vec::with_capacity(by_rank.len());
        for (rank, receipt) in by_rank.into_iter().enumerate() {
            for (assignment, (bytes, crc32)) in plan.of_rank(rank).iter().zip(receipt.parts) {
                tensors[assignment.tensor].parts.push(PartEntry {
                    file: rank,
                    bytes,
                    region: assignment.region.clone(),
                    crc32,
                });
            }
            files.push(receipt.file);
        }
        Ok(Index::new(IndexContent {
            mesh: plan.mesh().clone(),
            chunk_bytes: CHUNK_BYTES,
            files,
            tensors,
            training,
            model,
        }))
    }

    fn receipts_by_rank(
        &self,
        plan: &WritePlan,
        mut receipts: Vec<Receipt>,
    ) -> Result<Vec<Receipt>, Error> {
        let wrong = |expected: String, got: String| Error::Argument {
            argument: "receipts",
            expected,
            got,
        };
        receipts.sort_by_key(|receipt| receipt.rank);
        let ranks: Vec<_> = receipts.iter().map(|receipt| receipt.rank).collect();
        if !ranks.iter().copied().eq(0..plan.mesh().size()) {
            let expected = format!("one receipt of each of the {} ranks", plan.mesh().size());
            return Err(wrong(expected, format!("the receipts of ranks {ranks:?}")));
        }
        let plan_crc32 = plan_crc32(plan)?;
        for receipt in &receipts {
            let rank = receipt.rank;
            if receipt.ticket != self.ticket {
                let got = format!("a receipt of rank {rank} for {}", receipt.ticket.0);
                return Err(wrong(format!("for {}", self.ticket.0), got));
            }
            if receipt.plan_crc32 != plan_crc32 || receipt.parts.len() != plan.of_rank(rank).len() {
                let expected = "for the tensors that rank 0 saves".to_owned();
                return Err(wrong(
                    expected,
                    format!("a receipt of rank {rank} for other tensors"),
                ));
            }
        }
        Ok(receipts)
    }

    /// Checks that this rank sees the files of all ranks, with their sizes.
    fn check_files(&self, index: &Index) -> Result<(), Error> {
        for file in &index.files {
            let path = self.path.join(&file.name);
            let opened = self.checkpoints.storage().open_file(&path);
            let got = opened.and_then(|opened| opened.num_bytes());
            let got = got.map_err(Error::io("open", &path))?;
            if got != file.bytes {
                return Err(Error::FileSize {
                    path,
                    tensor: None,
                    expected: file.bytes,
                    got,
                });
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        // The next save would also do this.
        let removed = self.checkpoints.storage().remove_tree(&self.path);
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove an unfinished save");
        }
    }
}

impl Committed {
    /// Removes older steps like [`Checkpoints::keep_last`], with this step as the newest good one.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]. This step stays saved.
    pub fn keep_last(&self, keep: std::num::NonZeroUsize) -> Result<Vec<u64>, Error> {
        Ok(self.remove_older(keep)?.removed)
    }

    /// Does the work of [`keep_last`](Self::keep_last), and also returns the reasons why other steps stay.
    pub(crate) fn remove_older(&self, keep: std::num::NonZeroUsize) -> Result<Removal, Error> {
        self.checkpoints.remove_older(keep, self.step)
    }
}

/// Writes and syncs the file of one rank in the folder of the ticket. Each rank calls it, and sends the returned
/// receipt to rank 0 for the [commit](Staging::commit).
///
/// # Errors
///
/// [`Error::Argument`] for a rank outside the plan's mesh; [`Error::Source`] or [`Error::Length`] if the source cannot
/// supply a part that the plan assigns to this rank; [`Error::Io`].
pub fn write_shard(
    checkpoints: &Checkpoints,
    ticket: &Ticket,
    plan: &WritePlan,
    rank: usize,
    source: &mut dyn Source,
) -> Result<Receipt, Error> {
    let world_size = plan.mesh().size();
    if rank >= world_size {
        return Err(Error::Argument {
            argument: "rank",
            expected: format!("less than the plan's {world_size} ranks"),
            got: rank.to_string(),
        });
    }
    let storage = checkpoints.storage();
    let dir = checkpoints.hidden_path(&ticket.0);
    let name = format!("rank-{rank:05}.safetensors");
    let path = dir.join(&name);
    let header =
        header(plan, rank, world_size).map_err(|problem| Error::invalid(&path, problem))?;
    let file = storage.create_file(&path);
    let mut file = file.map_err(Error::io("create", &path))?;
    let written = file.write_all(&header);
    written.map_err(Error::io("write", &path))?;
    let mut end = header.len() as u64;
    let mut parts = Vec::new();
    for part in plan.of_rank(rank) {
        let checksums = write_part(&mut *file, &path, plan, part, source)?;
        parts.push((end..end + part.num_bytes as u64, checksums));
        end += part.num_bytes as u64;
    }
    file.sync().map_err(Error::io("sync", &path))?;
    drop(file);
    // On a network file system, each rank must sync its directory entry.
    storage.sync_dir(&dir).map_err(Error::io("sync", &dir))?;
    Ok(Receipt {
        rank,
        ticket: ticket.clone(),
        plan_crc32: plan_crc32(plan)?,
        file: FileEntry {
            name,
            bytes: end,
            header_bytes: header.len() as u64,
            header_crc32: crc32(&header),
        },
        parts,
    })
}

fn header(plan: &WritePlan, rank: usize, world_size: usize) -> Result<Vec<u8>, String> {
    let tensors = plan.of_rank(rank).iter().map(|part| {
        let tensor = &plan.tensors()[part.tensor];
        StoredTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: part.region.stored_shape(&tensor.shape),
            num_bytes: part.num_bytes,
        }
    });
    let metadata = HashMap::from([(
        "burn-fsdp-checkpoint".to_owned(),
        format!("version {FORMAT_VERSION}, rank {rank} of {world_size}"),
    )]);
    shard_header::encode(tensors.collect(), metadata)
}

/// Writes a part block by block. The checksum loads a block into the core's cache, from which it is then copied into
/// the page cache. The checksum therefore costs no second pass over memory.
fn write_part(
    file: &mut dyn WriteFile,
    path: &Path,
    plan: &WritePlan,
    part: &Assignment,
    source: &mut dyn Source,
) -> Result<Checksums, Error> {
    let tensor = &plan.tensors()[part.tensor];
    // An empty tensor may be written by a rank that holds none of it, so there is nothing to request.
    if part.num_bytes == 0 {
        return Ok(Checksums::default());
    }
    let data = source
        .part(tensor, &part.region)
        .map_err(|source| Error::Source {
            tensor: tensor.name.clone(),
            source,
        })?;
    let data = data.as_ref().as_ref();
    if data.len() != part.num_bytes {
        return Err(Error::Length {
            tensor: tensor.name.clone(),
            region: part.region.clone(),
            expected: part.num_bytes,
            got: data.len(),
        });
    }
    let mut checksums = Vec::with_capacity(data.len().div_ceil(CHUNK_BYTES as usize));
    for chunk in data.chunks(CHUNK_BYTES as usize) {
        let mut hasher = Hasher::new();
        for block in chunk.chunks(BLOCK_BYTES) {
            hasher.update(block);
            file.write_all(block).map_err(Error::io("write", path))?;
        }
        checksums.push(hasher.finalize());
    }
    Ok(Checksums(checksums))
}

fn plan_crc32(plan: &WritePlan) -> Result<u32, Error> {
    let json =
        serde_json::to_vec(&(plan.mesh(), plan.tensors())).map_err(|error| Error::Argument {
            argument: "plan",
            expected: "tensors that can be written as JSON".to_owned(),
            got: error.to_string(),
        })?;
    Ok(crc32(&json))
}

/// Returns true if the save is to replace an existing step with this number.
fn check_target(checkpoints: &Checkpoints, step: u64, existing: Existing) -> Result<bool, Error> {
    let path = checkpoints.path(step);
    let exists = checkpoints.storage().exists(&path);
    if !exists.map_err(Error::io("look for", &path))? {
        return Ok(false);
    }
    match existing {
        Existing::Refuse => Err(Error::Exists { path }),
        Existing::Replace => checkpoints.check_removable(step).map(|()| true),
    }
}
