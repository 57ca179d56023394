//! A report about a machine that does not answer, made from outside: where its processors and its
//! kernel's tasks stand, its interrupt controllers, and its kernel's log. Names come from the machine's
//! own memory, where the kernel has its symbols and a description of its structures.

mod btf;
mod dump;
mod hypervisor;
mod kallsyms;
mod kernel;

use std::{fmt::Write as _, fs, io::Read as _, path::Path, thread, time::Duration};

use crate::{
    emulator::qmp::Qmp,
    error::{Context, Result},
    host, paths,
    scene::Scene,
};
use dump::translate;
use kallsyms::Symbols;
use kernel::Kernel;

/// The report's file name in the machine's directory.
pub const REPORT: &str = "autopsy";
/// The whole log's file name.
const LOG: &str = "kernel's log";
/// The number of lines of the kernel's log in the report.
const LOG_LINES: usize = 60;
/// The part of the memory that is searched, in bytes. The lab's usual machines have less memory.
const MEMORY_LIMIT: u64 = 4 << 30;
/// The physical address of the memory that is behind the hole for devices.
const HIGH: u64 = 4 << 30;
/// The time between the two reads of the processors.
const PAUSE: Duration = Duration::from_secs(3);
/// The line that begins the log. Text follows soon after if this is the log, and not a copy of the
/// banner.
const BANNER: &[u8] = b"Linux version ";
const COMMAND_LINE: &[u8] = b"Command line: ";
/// The log ends where so many bytes in a row have never been written.
const SILENCE: usize = 4096;

/// Leaves a report in the machine's directory. The report names whatever cannot be found out.
pub fn perform(qmp: &Qmp, scene: &Scene, memory: u64) {
    let ask = |command: &str| qmp.human(command).unwrap_or_else(|error| error.to_string());
    let first = ask("info registers -a");
    thread::sleep(PAUSE);
    let second = ask("info registers -a");
    let controllers = format!("{}\n{}", ask("info pic"), ask("info lapic"));
    for (name, text) in [
        ("registers, at first", &first),
        ("registers, a while later", &second),
        ("interrupt controllers", &controllers),
    ] {
        let _ = fs::write(scene.dir().join(name), text);
    }
    let mut report = match memory_of(qmp, scene.dir(), memory) {
        Ok(memory) => describe(&memory, [&first, &second], scene.dir()),
        Err(error) => error.to_string(),
    };
    let _ = writeln!(report, "its interrupt controllers:\n{}", without_masked(&controllers));
    let _ = fs::write(scene.dir().join(REPORT), report);
}

/// Returns the physical addresses below which the memory ends, from 0 and from [`HIGH`], as on QEMU's Q35.
fn ends_of(memory: u64) -> [u64; 2] {
    const SPLITS_FROM: u64 = 0xB000_0000;
    const LOW_IF_SPLIT: u64 = 2 << 30;
    let low = if memory < SPLITS_FROM { memory } else { LOW_IF_SPLIT };
    [low, HIGH + memory - low]
}

/// Returns the memory by its physical addresses, with zeros in the hole.
fn memory_of(qmp: &Qmp, dir: &Path, memory: u64) -> Result<Vec<u8>> {
    let image = dir.join("memory");
    let ends = ends_of(memory.min(MEMORY_LIMIT));
    let mut bytes = Vec::new();
    for (start, end) in [0, HIGH].into_iter().zip(ends).filter(|(start, end)| start < end) {
        qmp.human(&format!("pmemsave {start} {} memory", end - start))?;
        bytes.resize(start as usize, 0);
        let read = fs::File::open(&image).and_then(|mut file| file.read_to_end(&mut bytes));
        let _ = fs::remove_file(&image);
        read.context(|| "read the machine's memory".into())?;
    }
    Ok(bytes)
}

/// Describes the state of a machine by its memory and by its registers, which were read twice.
fn describe(memory: &[u8], registers: [&str; 2], dir: &Path) -> String {
    let processors = registers.map(Processor::all);
    let all = Symbols::find_all(memory);
    let mut kernels: Vec<Kernel<'_>> = all.iter().filter_map(|one| Kernel::new(memory, one)).collect();
    // Remains of an earlier kernel may be in memory.
    let at_work = |kernel: &Kernel<'_>| {
        let places = processors.iter().flatten().map(|processor| processor.instruction);
        places.filter(|place| kernel.is_code(*place)).count()
    };
    kernels.sort_by_key(|kernel| std::cmp::Reverse(at_work(kernel)));
    let kernel = kernels.first();
    let mut report = format!("kernels with symbols in its memory: {}\n", kernels.len());
    for (moment, processors) in ["at first", "a while later"].iter().zip(&processors) {
        let _ = writeln!(report, "its processors, {moment}:");
        for processor in processors {
            let _ = writeln!(report, "{}", processor.describe(memory, kernel));
        }
    }
    if let Some(tasks) = kernel.and_then(Kernel::tasks) {
        let _ = writeln!(report, "its tasks that run or wait in the kernel:\n{tasks}");
    }
    let log = kernel.and_then(Kernel::log).unwrap_or_else(|| find_log(memory));
    let _ = fs::write(dir.join(LOG), &log);
    let _ = writeln!(report, "the last of its kernel's log:\n{}", host::last_lines(&log, LOG_LINES));
    report
}

/// What QEMU says of a processor.
#[derive(Debug, Default)]
struct Processor {
    text: String,
    instruction: u64,
    stack: u64,
    tables: u64,
    is_halted: bool,
}

impl Processor {
    /// Parses the registers of all processors.
    fn all(registers: &str) -> Vec<Self> {
        registers.split("CPU#").skip(1).map(Self::parse).collect()
    }

    fn parse(text: &str) -> Self {
        let value = |name: &str| {
            let (_, rest) = text.split_once(name)?;
            u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()
        };
        let wanted = ["RIP=", "CR0="];
        let lines = text.lines().filter(|line| wanted.iter().any(|start| line.starts_with(start)));
        let number = text.lines().next().unwrap_or_default().trim();
        Self {
            text: format!("CPU#{number} {}", lines.collect::<Vec<_>>().join(" ").replace('\r', "")),
            instruction: value("RIP=").unwrap_or_default(),
            stack: value("RSP=").unwrap_or_default(),
            tables: value("CR3=").unwrap_or_default() & !0xfff,
            is_halted: text.contains("HLT=1"),
        }
    }

    /// Says where the processor stands, and what has called the code there.
    fn describe(&self, memory: &[u8], kernel: Option<&Kernel<'_>>) -> String {
        let does = if self.is_halted { "rests" } else { "runs" };
        let place = match kernel {
            Some(kernel) if kernel.is_code(self.instruction) => {
                format!("{} < {}", kernel.name_of(self.instruction), kernel.calls(self.stack))
            }
            _ => translate(memory, self.tables, self.instruction)
                .and_then(|phys| hypervisor::name_of(memory, phys, &paths::lab_dir("hypervisor").ok()?))
                .unwrap_or_else(|| "code that is neither the kernel's nor the hypervisor's".into()),
        };
        format!("{}\n  {does} in {place}", self.text)
    }
}

/// Returns what QEMU says of interrupt controllers, without lines that are masked.
fn without_masked(controllers: &str) -> String {
    let lines = controllers.lines().map(str::trim_end);
    lines.filter(|line| !line.is_empty() && !line.contains("masked")).collect::<Vec<_>>().join("\n")
}
/// Returns the longest log in a machine's memory. The kernel leaves behind the shorter buffers that
/// it has outgrown.
fn find_log(memory: &[u8]) -> String {
    let begins = memchr::memmem::find_iter(memory, BANNER);
    let real = begins.filter(|&at| {
        let near = &memory[at..memory.len().min(at + 2048)];
        memchr::memmem::find(near, COMMAND_LINE).is_some()
    });
    real.map(|at| text_from(&memory[at..])).max_by_key(String::len).unwrap_or_else(|| "none found".to_owned())
}

/// Returns the runs of printable characters, each on a line, up to the part of the ring that has
/// not been written. The kernel may have taken a level's two characters from the front of a line;
/// they then follow once more at the line's end.
fn text_from(memory: &[u8]) -> String {
    let (mut text, mut run, mut silence) = (String::new(), String::new(), 0);
    for &byte in memory {
        if byte == b'\t' || byte == b' ' || byte.is_ascii_graphic() {
            run.push(byte as char);
            silence = 0;
            continue;
        }
        // Shorter runs are the numbers between the records.
        if run.len() > 4 {
            text += &run;
            text.push('\n');
        }
        run.clear();
        silence += 1;
        if silence > SILENCE {
            break;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_where_the_board_has_it() {
        const MIB: u64 = 1 << 20;
        assert_eq!(ends_of(1024 * MIB), [1024 * MIB, HIGH]);
        assert_eq!(ends_of(2815 * MIB), [2815 * MIB, HIGH]);
        assert_eq!(ends_of(2816 * MIB), [2048 * MIB, HIGH + 768 * MIB]);
        assert_eq!(ends_of(3072 * MIB), [2048 * MIB, HIGH + 1024 * MIB]);
    }

    #[test]
    fn a_processor_s_place_is_read() {
        let text = "\r\nCPU#0\r\nRAX=1 RBX=2\r\nRSI=0 RDI=0 RBP=0 RSP=ffffb0403e98\r\n\
            RIP=ffffffff860592eb RFL=00000202 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=1\r\n\
            CR0=80050033 CR2=00007f990802f068 CR3=00000000033ba001 CR4=003506f0\r\n\r\nCPU#1\r\nRIP=10 HLT=0";
        let all = Processor::all(text);
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].instruction, all[0].stack), (0xffff_ffff_8605_92eb, 0xffff_b040_3e98));
        assert_eq!((all[0].tables, all[0].is_halted), (0x33b_a000, true));
        assert_eq!((all[1].instruction, all[1].is_halted), (0x10, false));
        assert!(all[1].describe(&[], None).contains("runs in code that is neither"));
        assert!(all[0].text.starts_with("CPU#0 RIP=ffffffff860592eb"), "{}", all[0].text);
    }

    #[test]
    fn masked_interrupts_are_left_out() {
        assert_eq!(without_masked("pin 0 masked\r\n\r\npin 1 edge\r\n"), "pin 1 edge");
    }

    #[test]
    fn the_longest_log_is_found() {
        let mut memory = vec![0; 10_000];
        memory.extend(b"Linux version 6.1 (the banner alone)\0");
        memory.extend([0; 10_000]);
        memory.extend(b"Linux version 6.1\0\x01\0\0\0\0\0\0Command line: quiet\0");
        memory.extend([0; 10_000]);
        memory.extend(
            b"Linux version 6.1\0\x01\0\0\0\0\0\0Command line: quiet\0\x02\0\0\0\0smp: Bringing up\0",
        );
        memory.extend([0; 10_000]);
        memory.extend(b"something else");
        assert_eq!(find_log(&memory), "Linux version 6.1\nCommand line: quiet\nsmp: Bringing up\n");
        assert_eq!(find_log(b"Linux version 6.1"), "none found");
    }
}
