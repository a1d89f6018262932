//! Dumps of graphs to files: text, pictures, and the changes of each pass.

mod changes;
mod dot;
mod groups;
mod svg;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use burn_ir::TensorId;
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::error::{DumpError, Error};
use crate::graph::{Graph, Node, Role, Type};
use changes::Printed;
use groups::Group;

/// A callback that receives a plan's graph as it was traced and after each pass. The first argument names the part of a
/// step with three graphs, and is empty otherwise.
pub(crate) type Watch<'a> = dyn FnMut(&'static str, &Graph) + 'a;

/// Name of the file that lists the changes of each pass.
const CHANGES: &str = "changes.txt";

/// A folder for dumps of graphs. Each plan gets a subfolder, `graph-0` and so on, with these files:
///
/// | file | |
/// |---|---|
/// | `00-trace.txt` | the graph as it was traced, one line per given value, node and update |
/// | `01-units.txt`, `02-dead-code.txt` .. | the same after each pass, with the pass's name |
/// | `11-first-accumulate.txt` .. | the same for each part of a step that is split in three |
/// | `00-trace.svg` .. | a picture, in the order of the schedule: the computation by units, and the collectives |
/// | `00-trace.dot` .. | all operations and their inputs, for Graphviz |
/// | `changes.txt` | for each pass, the numbers of added, removed, changed and moved nodes, and the first lines that differ |
///
/// The subfolder of a plan is either complete or absent. The first plan replaces the folders of an earlier run, and
/// nothing else in the folder. Clones share the numbering.
///
/// ```
/// use burn_fsdp_spmd::GraphDump;
/// use burn_fsdp_spmd::graph::Graph;
/// use burn_fsdp_spmd::passes::{DeadCode, Pipeline};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let stages = Pipeline::new().then(DeadCode).stages(Graph::new())?;
/// let written = GraphDump::new(folder).write("an empty graph", &stages)?;
/// assert_eq!(written, folder.join("graph-0"));
/// assert!(written.join("01-dead-code.txt").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct GraphDump {
    folder: PathBuf,
    /// Number of plans written.
    written: Arc<Mutex<usize>>,
}

/// The dump of one plan, while it is written.
pub(crate) struct Record<'a> {
    dump: &'a GraphDump,
    /// The hidden folder that holds the dump until it is complete.
    folder: TempDir,
    title: &'a str,
    /// Number of graphs so far.
    number: usize,
    /// Name of the last part seen; empty for the whole.
    part: &'static str,
    last: Option<Rc<Printed>>,
    /// The last graph of the whole step, before it was split into parts.
    whole: Option<Rc<Printed>>,
    changes: String,
    failed: Option<DumpError>,
}

impl GraphDump {
    /// Creates a dump to a folder, which is created when the first graph is written.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            written: Arc::default(),
        }
    }

    /// Writes the graphs of a plan, as [`Pipeline::stages`](crate::passes::Pipeline::stages) returns them. `title`
    /// describes the purpose of the plan. Returns the folder.
    ///
    /// # Errors
    ///
    /// [`Error::Dump`].
    pub fn write(&self, title: &str, stages: &[Graph]) -> Result<PathBuf, Error> {
        let mut record = self.begin(title)?;
        stages.iter().for_each(|graph| record.see("", graph));
        Ok(record.end(None)?)
    }

    /// Checks that graphs can be written, and that the graphs of an earlier run can be replaced. Leaves nothing behind.
    ///
    /// # Errors
    ///
    /// [`Error::Dump`].
    pub fn check(&self) -> Result<(), Error> {
        let there = self.folder.ancestors().find(|above| above.exists());
        let there = there.unwrap_or(Path::new("."));
        let tried = self.hidden_in(there)?;
        tried
            .close()
            .map_err(|error| DumpError::write(&self.folder, &error))?;
        if self.folder.exists() {
            earlier(&self.folder)?;
        }
        Ok(())
    }

    /// Creates a folder with an unused name, which is removed with its contents unless it is kept.
    fn hidden_in(&self, folder: &Path) -> Result<TempDir, DumpError> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".graph-").suffix(".part");
        #[cfg(unix)]
        {
            // Permissions as for any new folder, subject to the process's mask.
            let all = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o777);
            builder.permissions(all);
        }
        let made = builder.tempdir_in(folder);
        made.map_err(|error| DumpError::write(&self.folder, &error))
    }

    /// Begins to write the graphs of a plan.
    pub(crate) fn begin<'a>(&'a self, title: &'a str) -> Result<Record<'a>, DumpError> {
        let made = fs::create_dir_all(&self.folder);
        made.map_err(|error| DumpError::write(&self.folder, &error))?;
        Ok(Record {
            dump: self,
            folder: self.hidden_in(&self.folder)?,
            title,
            number: 0,
            part: "",
            last: None,
            whole: None,
            changes: String::new(),
            failed: None,
        })
    }

    /// Moves a complete folder to its final path.
    fn keep(&self, folder: TempDir) -> Result<PathBuf, DumpError> {
        let mut written = self.written.lock();
        if *written == 0 {
            remove_earlier(&self.folder)?;
        }
        let path = self.folder.join(format!("graph-{written}"));
        fs::rename(folder.path(), &path).map_err(|error| DumpError::write(&path, &error))?;
        // The folder is no longer at its old path.
        let _ = folder.keep();
        *written += 1;
        Ok(path)
    }
}

impl Record<'_> {
    /// Writes the next graph. [`end`](Self::end) reports errors.
    pub(crate) fn see(&mut self, part: &'static str, graph: &Graph) {
        if self.failed.is_some() {
            return;
        }
        if let Err((path, error)) = self.write(part, graph) {
            self.failed = Some(DumpError::write(&path, &error));
        }
    }

    fn write(&mut self, part: &'static str, graph: &Graph) -> Result<(), (PathBuf, io::Error)> {
        if part != self.part {
            self.part = part;
            self.last.clone_from(&self.whole);
        }
        let name = format!("{:02}-{}", self.number, file_name(part, graph));
        let printed = Rc::new(Printed::new(&name, graph));
        let groups = Group::of(graph);
        for (extension, text) in [
            ("txt", printed.text()),
            ("dot", &dot::draw(&name, graph, &groups)),
            ("svg", &svg::draw(&printed, graph, &groups)),
        ] {
            self.put(&format!("{name}.{extension}"), text)?;
        }
        self.changes += &match &self.last {
            None => format!("{}{}", heading(self.title, graph), printed.summary()),
            Some(last) => printed.since(last),
        };
        if part.is_empty() {
            self.whole = Some(printed.clone());
        }
        self.last = Some(printed);
        self.number += 1;
        Ok(())
    }

    fn put(&self, name: &str, text: &str) -> Result<(), (PathBuf, io::Error)> {
        let path = self.folder.path().join(name);
        // The error names the final path.
        fs::write(path, text).map_err(|error| (self.dump.folder.join(name), error))
    }

    /// Writes the changes, and the error if the plan was rejected. Returns the folder.
    pub(crate) fn end(mut self, error: Option<&Error>) -> Result<PathBuf, DumpError> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        match (error, &self.last) {
            (Some(error), _) => self.changes += &format!("\nThere is no plan: {error}\n"),
            (None, Some(last)) => self.changes += &last.fingerprints(),
            (None, None) => {}
        }
        let put = self.put(CHANGES, &self.changes);
        put.map_err(|(path, error)| DumpError::write(&path, &error))?;
        let path = self.dump.keep(self.folder)?;
        tracing::info!(folder = %path.display(), "graphs written");
        Ok(path)
    }
}

/// Returns the file name of a graph: the part of the step, then the pass that produced it.
fn file_name(part: &str, graph: &Graph) -> String {
    let made_by = graph.applied().last();
    let made_by = made_by.map_or_else(|| "trace".to_owned(), ToString::to_string);
    let name = match part {
        "" => made_by,
        part => format!("{part} {made_by}"),
    };
    // User passes have arbitrary names.
    let plain = |letter: char| {
        if letter.is_ascii_alphanumeric() {
            letter.to_ascii_lowercase()
        } else {
            '-'
        }
    };
    name.chars().map(plain).take(60).collect()
}

/// Returns the heading of the list of changes: the purpose, inputs and optimizer states of a plan.
fn heading(title: &str, graph: &Graph) -> String {
    let inputs = graph.inputs().iter().filter_map(|id| graph.value(*id));
    let inputs = inputs.map(|value| format!("{} {}", value.role, Type(value)));
    let inputs: Vec<_> = inputs.collect();
    let is_state = |id: &TensorId| {
        let role = graph.value(*id).map(|value| &value.role);
        matches!(role, Some(Role::State { .. }))
    };
    let read: BTreeSet<_> = graph.nodes().iter().flat_map(Node::inputs).collect();
    let states = match read.iter().filter(|id| is_state(id)).count() {
        0 => "no state of the optimizer".to_owned(),
        states => format!("{states} states of the optimizer"),
    };
    format!(
        "{title}: {}, {states}\n\n{}\n",
        inputs.join(", "),
        changes::LEGEND
    )
}

/// Removes the graphs of an earlier run, and nothing else.
fn remove_earlier(folder: &Path) -> Result<(), DumpError> {
    for (folder, files) in earlier(folder)? {
        for file in &files {
            fs::remove_file(file).map_err(|error| DumpError::write(file, &error))?;
        }
        fs::remove_dir(&folder).map_err(|error| DumpError::write(&folder, &error))?;
    }
    Ok(())
}

/// Finds the graphs of an earlier run: the folders, and the files of each. Rejects anything else in their place or
/// among their files.
fn earlier(folder: &Path) -> Result<Vec<(PathBuf, Vec<PathBuf>)>, DumpError> {
    let in_the_way = |path: PathBuf| DumpError::InTheWay {
        folder: folder.to_owned(),
        path,
    };
    let mut found = Vec::new();
    for entry in entries(folder)? {
        if !is_numbered(&entry) {
            continue;
        }
        if !is_plain(&entry, fs::Metadata::is_dir) {
            return Err(in_the_way(entry));
        }
        let files = entries(&entry)?;
        let is_other =
            |file: &&PathBuf| !is_of_dump(file) || !is_plain(file, fs::Metadata::is_file);
        if let Some(other) = files.iter().find(is_other) {
            return Err(in_the_way(other.clone()));
        }
        found.push((entry, files));
    }
    Ok(found)
}

/// Lists the entries of a folder, sorted by name.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, DumpError> {
    let entries = fs::read_dir(folder);
    let paths = entries.and_then(|entries| {
        let paths = entries.map(|entry| Ok(entry?.path()));
        paths.collect::<io::Result<Vec<_>>>()
    });
    let mut paths = paths.map_err(|error| DumpError::write(folder, &error))?;
    paths.sort();
    Ok(paths)
}

/// Returns true if a path is of the expected kind, and not a link.
fn is_plain(path: &Path, is: fn(&fs::Metadata) -> bool) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| is(&metadata))
}

/// Returns true if a path has the name of a plan's folder.
fn is_numbered(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let number = name.and_then(|name| name.strip_prefix("graph-"));
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Returns true if a file has a name that dumps use.
fn is_of_dump(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else { return false };
    let number = name.split_once('-').map_or("", |(number, _)| number);
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    let is_number = number.len() >= 2 && number.bytes().all(|byte| byte.is_ascii_digit());
    name == CHANGES || is_number && ["txt", "dot", "svg"].contains(&extension)
}
