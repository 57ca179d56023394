//! `lab bench disco`: how soon machines begin that are copies of one, and the memory that they take.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    artefacts,
    error::{Context, Error, Result},
    hosted::root_archive,
    image::{Image, Release},
    live,
    markdown::table,
    paths,
    previrtualization::{self, Flavour},
};
use serde::Serialize;

use super::stats::{self, rounded};

/// The heading of this section in docs/benchmarks.md.
pub const HEADING: &str = "## Many machines as copies of one";
/// The key of this section in docs/benchmarks.json.
pub const KEY: &str = "disco";

/// The machines that begin together.
pub const MANY: usize = 32;
/// The size of a machine's memory, in MiB.
const MEMORY_MIB: u64 = 256;
/// The sizes of machines that are forked while they run.
const FORKED_MIB: [u64; 3] = [64, MEMORY_MIB, 4096];
/// The forks of each of them.
const FORKS: usize = 5;
/// The aim: a machine that is forked stands still so many milliseconds at most.
const PAUSE_WITHIN_MS: f64 = 2.0;
/// The aims: a clone's first answer, and that of the last of many, in milliseconds.
const ONE_WITHIN_MS: f64 = 10.0;
const MANY_WITHIN_MS: f64 = 300.0;
/// The aim: a boot takes so many times as long.
const OVER_BOOT: f64 = 50.0;
const ROUNDS: usize = 9;
const LIMIT: Duration = Duration::from_secs(120);
/// The time after which a machine has nothing to do any more.
const REST: Duration = Duration::from_secs(2);

/// The interpreter and its libraries, in Debian's image beneath `usr`.
const FILES: [&str; 3] = ["bin/perl", "lib/x86_64-linux-gnu/libm.so.6", "lib/x86_64-linux-gnu/libcrypt.so.1"];
/// The kernel's generator and its empty file.
const DEVICES: [(&str, (u32, u32)); 2] = [("urandom", (1, 9)), ("dev/null", (1, 3))];

/// An interpreter that has started, has some memory, and answers each line. It reads a random number
/// before it waits: the kernel takes a second for the first one.
const INIT: &str = "#!/bin/sh\n\
    exec perl -e '$| = 1; my @warm = map { \"line $_\" x 10 } 1..20000; \
    open R, \"</urandom\"; read R, $r, 8; print \"up\\n\"; \
    while (<STDIN>) { chomp; open R, \"</urandom\"; read R, $r, 8; \
    print \"answer $_ \" . unpack(\"H*\", $r) . \"\\n\" }'\n";

/// The figures.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// From the command to the first answer of a machine that boots.
    #[serde(serialize_with = "rounded")]
    boot_ms: f64,
    /// The same of a saved machine that is restored.
    #[serde(serialize_with = "rounded")]
    restore_ms: f64,
    /// The same of a clone.
    #[serde(serialize_with = "rounded")]
    clone_ms: f64,
    /// From the command to the first answer of the last of [`MANY`] clones.
    #[serde(serialize_with = "rounded")]
    many_ms: f64,
    machines: usize,
    /// The template's memory.
    #[serde(serialize_with = "rounded")]
    base_mib: f64,
    /// The mean of the memory of a clone that is idle.
    idle: Memory,
    /// Forks of running machines, by the size of their memory.
    forks: Vec<Fork>,
}

/// Forks of a machine.
#[derive(Clone, Copy, Debug, Serialize)]
struct Fork {
    memory_mib: u64,
    /// The median time in which the machine stood still, by its own clock.
    #[serde(serialize_with = "rounded")]
    pause_ms: f64,
    /// The same from the command to the first answer of the copy.
    #[serde(serialize_with = "rounded")]
    fork_ms: f64,
}

/// Memory in MiB.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Memory {
    /// Pages of its own.
    #[serde(serialize_with = "rounded")]
    pub(crate) own: f64,
    /// The host's kernel's count (PSS): the guest's, with its share of the template's.
    #[serde(serialize_with = "rounded")]
    guest: f64,
    #[serde(serialize_with = "rounded")]
    monitor: f64,
}

/// The files of the machines.
#[derive(Debug)]
pub(crate) struct Files {
    mercury: PathBuf,
    vmlinux: PathBuf,
    archive: PathBuf,
    folder: PathBuf,
    pub(crate) template: String,
    memory_mib: u64,
}

impl Files {
    /// Builds what is missing.
    pub(crate) fn make(release: Release) -> Result<Self> {
        let vmlinux = previrtualization::build(release, Flavour::Tiny)?.vmlinux;
        let folder = paths::lab_dir("bench")?.join("disco");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).context(|| format!("make {}", folder.display()))?;
        let tree = Image::ensure(release)?.tree();
        let from = FILES.map(|file| (file, tree.join("usr").join(file)));
        let files: Vec<(&str, &Path)> = from.iter().map(|(place, from)| (*place, from.as_path())).collect();
        let archive = root_archive(&tree, &files, &DEVICES, INIT)?;
        let path = folder.join("initramfs");
        fs::write(&path, archive).context(|| format!("write {}", path.display()))?;
        let template = format!("bench-{}", std::process::id());
        let (mercury, memory_mib) = (artefacts::build_hosted()?, MEMORY_MIB);
        Ok(Self { mercury, vmlinux, archive: path, folder, template, memory_mib })
    }

    /// Returns the same for machines of another size.
    fn resize(&mut self, memory_mib: u64) -> Result<()> {
        self.remove()?;
        let _ = fs::remove_file(self.folder.join("saved"));
        self.memory_mib = memory_mib;
        self.make_template()
    }

    fn mercury(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.mercury);
        command.args(words).current_dir(&self.folder);
        command
    }

    fn machine(&self, words: &[&str]) -> Command {
        let mut command = self.mercury(words);
        command.args(["--memory", &self.memory_mib.to_string(), "--kernel"]).arg(&self.vmlinux);
        command
    }

    fn boot(&self) -> Command {
        let mut command = self.machine(&["hosted", "run", "--control", "control"]);
        command.args(["--append", "quiet loglevel=1", "--initramfs"]).arg(&self.archive);
        command
    }

    fn done(&self, mut command: Command) -> Result<String> {
        let output = command.output().context(|| "start mercury".into())?;
        if !output.status.success() {
            return Err(Error::Host(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns what a command prints.
    pub(crate) fn text(&self, words: &[&str]) -> Result<String> {
        self.done(self.mercury(words))
    }

    /// Boots a machine. Returns the time to its first answer, in milliseconds.
    pub(crate) fn boot_once(&self) -> Result<f64> {
        let _ = fs::remove_file(self.folder.join("control"));
        let time = first_answer(&mut self.boot(), true);
        let _ = fs::remove_file(self.folder.join("control"));
        time
    }

    /// Ends the template and its machines.
    pub(crate) fn remove(&self) -> Result<()> {
        self.text(&["disco", "rm", &self.template]).map(drop)
    }

    /// Makes the template of a machine that is saved when it has begun.
    pub(crate) fn make_template(&self) -> Result<()> {
        let _ = fs::remove_file(self.folder.join("control"));
        let (mut machine, mut lines) = start(&mut self.boot())?;
        await_line(&mut lines, "up")?;
        self.done(self.mercury(&["hosted", "save", "control", "saved"]))?;
        let _ = machine.wait();
        self.done(self.machine(&["disco", "template", &self.template, "saved"])).map(drop)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = self.remove();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

type Lines = BufReader<std::process::ChildStdout>;

fn start(command: &mut Command) -> Result<(Child, Lines)> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context(|| "start a machine".into())?;
    let output = child.stdout.take().ok_or_else(|| Error::Host("a machine has no output".to_owned()))?;
    Ok((child, BufReader::new(output)))
}

fn await_line(lines: &mut Lines, word: &str) -> Result<()> {
    let mut line = String::new();
    loop {
        line.clear();
        let length = lines.read_line(&mut line).context(|| "read a machine's console".into())?;
        if length == 0 {
            return Err(Error::Host(format!("a machine has ended without saying {word:?}")));
        }
        if line.starts_with(word) {
            return Ok(());
        }
    }
}

/// Returns the time from a command to the first answer of its machine, in milliseconds. A machine that boots
/// is asked when it is up.
fn first_answer(command: &mut Command, boots: bool) -> Result<f64> {
    let begin = Instant::now();
    let (mut child, mut lines) = start(command)?;
    let answer = || -> Result<f64> {
        if boots {
            await_line(&mut lines, "up")?;
        }
        let mut input = child.stdin.as_ref().ok_or_else(|| Error::Host("no input".to_owned()))?;
        input.write_all(b"go\n").context(|| "ask a machine".into())?;
        await_line(&mut lines, "answer go")?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    };
    let answer = { answer }();
    // The machine ends as at a power cut.
    let _ = rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    );
    let _ = child.wait();
    answer
}

fn medians(rounds: usize, mut one: impl FnMut() -> Result<f64>) -> Result<f64> {
    let all = (0..rounds).map(|_| one()).collect::<Result<Vec<f64>>>()?;
    Ok(stats::median(&all))
}

/// A machine in the background, by its console.
#[derive(Debug)]
pub(crate) struct Background(PathBuf);

impl Background {
    /// Returns the machines with these names.
    pub(crate) fn all(names: &serde_json::Value) -> Vec<Self> {
        let root = if rustix::process::geteuid().is_root() {
            "/run".into()
        } else {
            std::env::var_os("XDG_RUNTIME_DIR").unwrap_or_default()
        };
        let folder = Path::new(&root).join("mercury/disco/machines");
        let names = names.as_array().into_iter().flatten().filter_map(serde_json::Value::as_str);
        names.map(|name| Self(folder.join(name))).collect()
    }

    fn ask(&self) -> Result<()> {
        let pipe = self.0.join("console.in");
        let wrong = || format!("write to {}", pipe.display());
        let mut pipe = File::options().write(true).open(&pipe).context(wrong)?;
        pipe.write_all(b"go\n").context(|| "ask a machine".into())
    }

    /// Waits for the answer.
    fn await_answer(&self) -> Result<()> {
        let begin = Instant::now();
        while !self.has_answered() {
            if begin.elapsed() > LIMIT {
                return Err(Error::Host("a machine does not answer".to_owned()));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn has_answered(&self) -> bool {
        self.answer().is_some()
    }

    /// Returns the machine's answer, if it has come.
    pub(crate) fn answer(&self) -> Option<String> {
        let said = fs::read_to_string(self.0.join("console.log")).ok()?;
        let answer = said.lines().find(|line| line.starts_with("answer go"))?;
        said.ends_with('\n').then(|| answer.to_owned())
    }
}

/// Starts many clones. Returns the time to the first answer of the last one, and their names.
pub(crate) fn many(files: &Files) -> Result<(f64, serde_json::Value)> {
    let begin = Instant::now();
    let command = files.mercury(&["--json", "disco", "run", &files.template, "--count", &MANY.to_string()]);
    let started: serde_json::Value =
        serde_json::from_str(&files.done(command)?).context(|| "read the names of machines".into())?;
    let machines = Background::all(&started["machines"]);
    machines.iter().try_for_each(Background::ask)?;
    while !machines.iter().all(Background::has_answered) {
        if begin.elapsed() > LIMIT {
            return Err(Error::Host("a clone does not answer".to_owned()));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok((begin.elapsed().as_secs_f64() * 1e3, started["machines"].clone()))
}

/// Forks a running machine of the template. Returns the milliseconds in which the machine stood still, those
/// from the command to the copy's first answer, and the copy.
pub(crate) fn fork(files: &Files, machine: &str) -> Result<(f64, f64, Background)> {
    let begin = Instant::now();
    let command = files.mercury(&["--json", "disco", "fork", machine]);
    let forked: serde_json::Value =
        serde_json::from_str(&files.done(command)?).context(|| "read the names of machines".into())?;
    let pause_us =
        forked["pause_us"].as_f64().ok_or_else(|| Error::Host("a fork has no pause".to_owned()))?;
    let copies = Background::all(&forked["machines"]);
    let copy = copies.into_iter().next().ok_or_else(|| Error::Host("a fork has made no copy".to_owned()))?;
    copy.ask()?;
    copy.await_answer()?;
    Ok((pause_us / 1e3, begin.elapsed().as_secs_f64() * 1e3, copy))
}

/// Forks a machine of each size again and again.
fn forks(files: &mut Files) -> Result<Vec<Fork>> {
    let mut all = Vec::new();
    for memory_mib in FORKED_MIB {
        files.resize(memory_mib)?;
        files.text(&["disco", "run", &files.template, "--detach", "--name", "forked"])?;
        let machine = Background::all(&serde_json::json!(["forked"])).remove(0);
        machine.ask()?;
        machine.await_answer()?;
        let (mut pauses, mut times) = (Vec::new(), Vec::new());
        for _ in 0..FORKS {
            let (pause, time, _) = fork(files, "forked")?;
            pauses.push(pause);
            times.push(time);
        }
        let (pause_ms, fork_ms) = (stats::median(&pauses), stats::median(&times));
        all.push(Fork { memory_mib, pause_ms, fork_ms });
    }
    Ok(all)
}

/// Returns the memory of the template, and the mean of that of its clones.
pub(crate) fn memory(files: &Files) -> Result<(f64, Memory)> {
    thread::sleep(REST);
    let text = files.done(files.mercury(&["--json", "disco", "map"]))?;
    let map: serde_json::Value = serde_json::from_str(&text).context(|| "read the map".into())?;
    let mib = |bytes: &serde_json::Value| bytes.as_f64().unwrap_or(0.0) / f64::from(1 << 20);
    let of = |name: &str, all: &serde_json::Value| {
        let all = all.as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|one| one[name] == files.template.as_str()).collect::<Vec<_>>()
    };
    let (templates, machines) = (of("template", &map["templates"]), of("template", &map["machines"]));
    let mean = |field: fn(&serde_json::Value) -> [&serde_json::Value; 2]| {
        let sum: f64 = machines.iter().map(|one| field(one).into_iter().map(mib).sum::<f64>()).sum();
        sum / machines.len().max(1) as f64
    };
    let idle = Memory {
        own: mean(|one| [&one["own_bytes"], &serde_json::Value::Null]),
        guest: mean(|one| [&one["pss"]["base_bytes"], &one["pss"]["own_bytes"]]),
        monitor: mean(|one| [&one["pss"]["monitor_bytes"], &serde_json::Value::Null]),
    };
    Ok((templates.iter().map(|one| mib(&one["base_bytes"])).sum(), idle))
}

/// Measures all of it.
///
/// # Errors
/// If a part of the project does not build, or a machine does not answer.
pub fn measure(release: Release) -> Result<Figures> {
    let mut files = Files::make(release)?;
    live::say("A machine boots, is saved, and is restored");
    let boot_ms = medians(3, || files.boot_once())?;
    files.make_template()?;
    let restore_ms = medians(3, || first_answer(&mut files.machine(&["hosted", "restore", "saved"]), false))?;
    live::say(&format!("{ROUNDS} clones one after the other, and {MANY} at once"));
    let clone_ms =
        medians(ROUNDS, || first_answer(&mut files.mercury(&["disco", "run", &files.template]), false))?;
    let (many_ms, _) = many(&files)?;
    let (base_mib, idle) = memory(&files)?;
    live::say("Running machines of several sizes are forked");
    let forks = forks(&mut files)?;
    Ok(Figures { boot_ms, restore_ms, clone_ms, many_ms, machines: MANY, base_mib, idle, forks })
}

/// Returns the promises, and for each true if it is kept. Times of a shared host promise nothing.
#[must_use]
pub fn promises(figures: &Figures) -> [(bool, &'static str); 1] {
    [(
        figures.boot_ms >= OVER_BOOT * figures.clone_ms,
        "a boot is not 50 times as long as a clone's beginning",
    )]
}

/// Returns the section in docs/benchmarks.md.
#[must_use]
pub fn section(figures: &Figures) -> String {
    let word = |kept: bool| if kept { "kept" } else { "**missed**" };
    let row = |what: &str, ms: f64, aim: String| vec![what.to_owned(), format!("{ms:.1}"), aim];
    let aim = |most: f64, ms: f64| format!("{most:.0} ({})", word(ms <= most));
    let times = [
        row("a boot", figures.boot_ms, "-".to_owned()),
        row("a restore", figures.restore_ms, "-".to_owned()),
        row("a clone", figures.clone_ms, aim(ONE_WITHIN_MS, figures.clone_ms)),
        row(
            &format!("the last of {} clones", figures.machines),
            figures.many_ms,
            aim(MANY_WITHIN_MS, figures.many_ms),
        ),
    ];
    let ratio = figures.boot_ms / figures.clone_ms;
    let Memory { own, guest, monitor } = figures.idle;
    let of = |fork: &Fork| {
        let times = [fork.pause_ms, fork.fork_ms].map(|ms| format!("{ms:.1}"));
        [vec![format!("{} MiB", fork.memory_mib)], times.to_vec()].concat()
    };
    let forks: Vec<_> = figures.forks.iter().map(of).collect();
    let longest = figures.forks.iter().map(|fork| fork.pause_ms).fold(0.0, f64::max);
    format!(
        "{HEADING}\n\n\
        `lab bench disco` writes this section alone ([disco.md](disco.md)). A machine of {MEMORY_MIB} MiB \
        with the smallest\n\
        kernel runs a Perl program with some MiB of data, which answers lines. The table has the \
        milliseconds from the\n\
        command to the first answer, in the median, on the host that wrote this page. Other work of the host \
        is in them.\n\n{}\n\
        A boot takes {ratio:.0} times as long as a clone's beginning. The aim is {OVER_BOOT:.0} ({}).\n\n\
        The template has {:.1} MiB. An idle clone, of {}, has {own:.1} MiB of its own. By the host's \
        kernel's count (PSS) it\n\
        has {guest:.1} MiB of guest's memory, with its share of the template's, and {monitor:.1} MiB of \
        monitor. The aim for the\n\
        sum is 4 MiB ({}).\n\n\
        A running machine is forked {FORKS} times (`mercury disco fork`). The table has the medians, in \
        milliseconds: the time\n\
        in which the machine stands still, and from the command to the first answer of the copy. The aim for \
        the first is\n\
        {PAUSE_WITHIN_MS:.0} ({}).\n\n{}",
        table(&["", "milliseconds", "aim"], &times),
        word(ratio >= OVER_BOOT),
        figures.base_mib,
        figures.machines,
        word(guest + monitor <= 4.0),
        word(longest <= PAUSE_WITHIN_MS),
        table(&["memory of the machine", "it stands still", "first answer of a copy"], &forks),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missed_is_said() {
        let idle = Memory { own: 1.0, guest: 1.5, monitor: 5.0 };
        let figures = Figures {
            boot_ms: 1000.0,
            restore_ms: 400.0,
            clone_ms: 12.0,
            many_ms: 250.0,
            machines: MANY,
            base_mib: 20.0,
            idle,
            forks: vec![Fork { memory_mib: 64, pause_ms: 2.5, fork_ms: 30.0 }],
        };
        let text = section(&figures);
        assert!(text.contains("83 times as long") && text.contains("50 (kept)"), "{text}");
        assert!(text.contains("10 (**missed**)") && text.contains("300 (kept)"), "{text}");
        assert!(text.contains("4 MiB (**missed**)") && promises(&figures)[0].0, "{text}");
        assert!(text.contains("2 (**missed**)") && text.contains("64 MiB"), "{text}");
    }
}
