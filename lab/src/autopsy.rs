//! A report about a machine that does not answer, made from outside: the registers of its
//! processors, and its kernel's log, read from its memory.

use std::{fmt::Write as _, fs, path::Path, thread, time::Duration};

use crate::{
    emulator::qmp::Qmp,
    error::{Context, Result},
    host,
    scene::Scene,
};

/// The report's file name in the machine's directory.
pub const REPORT: &str = "autopsy";
/// The number of lines of the kernel's log in the report.
const LOG_LINES: usize = 40;
/// The part of the memory that is searched for the log, in bytes. The lab's usual machines have
/// less memory.
const MEMORY_LIMIT: u64 = 4 << 30;
/// The line that begins the log. Text follows soon after if this is the log, and not a copy of the
/// banner.
const BANNER: &[u8] = b"Linux version ";
const COMMAND_LINE: &[u8] = b"Command line: ";
/// The log ends where so many bytes in a row have never been written.
const SILENCE: usize = 4096;

/// Leaves a report in the machine's directory. The report names whatever cannot be found out.
pub fn perform(qmp: &Qmp, scene: &Scene, memory: u64) {
    let mut report = String::new();
    for (moment, pause) in [("at first", 0), ("a second later", 1)] {
        thread::sleep(Duration::from_secs(pause));
        let registers = qmp.human("info registers -a").unwrap_or_else(|error| error.to_string());
        let _ = fs::write(scene.dir().join(format!("registers, {moment}")), &registers);
        let _ = writeln!(report, "its processors, {moment}:\n{}", where_they_are(&registers));
    }
    let log = kernel_log(qmp, scene.dir(), memory).unwrap_or_else(|error| error.to_string());
    let _ = writeln!(report, "the last of its kernel's log:\n{}", host::last_lines(&log, LOG_LINES));
    let _ = fs::write(scene.dir().join(REPORT), report);
}

/// Returns the lines with the instruction pointers and the control registers, of all registers that
/// QEMU prints.
fn where_they_are(registers: &str) -> String {
    let wanted = ["CPU#", "RIP=", "CR0="];
    let lines = registers.lines().filter(|line| wanted.iter().any(|start| line.starts_with(start)));
    lines.collect::<Vec<_>>().join("\n")
}

fn kernel_log(qmp: &Qmp, dir: &Path, memory: u64) -> Result<String> {
    let image = dir.join("memory");
    let size = memory.min(MEMORY_LIMIT);
    qmp.human(&format!("pmemsave 0 {size} memory"))?;
    let bytes = fs::read(&image).context(|| "read the machine's memory".into())?;
    let _ = fs::remove_file(&image);
    Ok(find_log(&bytes))
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
