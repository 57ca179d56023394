//! Manual pages and shell completions, made from the definition of the command line.

use std::{fs, io, path::Path};

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};
use clap_mangen::roff::{Roff, bold, italic, roman};

use crate::args::{Cli, TABLE};

const NAME: &str = "afterburner";
/// Section of the manual: user commands.
const SECTION: &str = "1";

/// What a manual page has besides the definition of the command line.
struct Page {
    /// The words after `afterburner`.
    command: &'static str,
    /// Command lines, each after its purpose.
    examples: &'static [(&'static str, &'static str)],
    /// Files, each with its content.
    files: &'static [(&'static str, &'static str)],
    see_also: &'static [&'static str],
}

const VMLINUX: (&str, &str) = ("vmlinux", "the kernel, with its slots in the section .mercury.slots");
const SOURCE: &str = "The kernel's source, configured by make menuconfig or the like.";

const PAGES: [Page; 4] = [
    Page {
        command: "",
        examples: &[
            ("Build a kernel in its source, on four processors", "afterburner make -j4 vmlinux"),
            ("Check the result", "afterburner verify vmlinux"),
            ("Start it as a process", "mercury hosted run --kernel vmlinux --initramfs root.cpio"),
        ],
        files: &[VMLINUX],
        see_also: &[
            "afterburner-make(1)",
            "afterburner-verify(1)",
            "afterburner-list(1)",
            "mercury-hosted(8)",
        ],
    },
    Page {
        command: "make",
        examples: &[
            (
                "Build kernel and modules in a folder of their own",
                "afterburner make -j4 O=../build bzImage modules",
            ),
            ("Build with another compiler of C", "afterburner make CC=gcc-12 vmlinux"),
        ],
        files: &[(".config", SOURCE), VMLINUX],
        see_also: &["afterburner(1)", "afterburner-verify(1)", "make(1)", "as(1)"],
    },
    Page {
        command: "verify",
        examples: &[
            ("Check a kernel and a module", "afterburner verify vmlinux fs/ext4/ext4.ko"),
            ("Check it in a script", "afterburner verify --json vmlinux > report.json"),
        ],
        files: &[VMLINUX],
        see_also: &["afterburner(1)", "afterburner-list(1)", "objdump(1)"],
    },
    Page {
        command: "list",
        examples: &[
            ("Show the slots of a kernel", "afterburner list vmlinux"),
            ("Count the slots, with jq", "afterburner list --json vmlinux | jq -s length"),
        ],
        files: &[VMLINUX],
        see_also: &["afterburner(1)", "afterburner-verify(1)"],
    },
];

/// Environment variables, each with its effect.
const ENVIRONMENT: [(&str, &str); 1] =
    [("PATH", "make, the compiler and the assembler are found by it, as without the afterburner.")];

/// Writes a manual page for the command and one for each of its visible subcommands.
///
/// # Errors
/// A file cannot be written.
pub fn man(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = Cli::command();
    command.build();
    page(&command, directory, NAME)
}

fn page(command: &Command, directory: &Path, name: &str) -> io::Result<()> {
    let title = name.replace(' ', "-");
    let named = command.clone().name(title.clone()).bin_name(name).after_help(TABLE);
    let mut text = Vec::new();
    clap_mangen::Man::new(named).title(title.to_uppercase()).section(SECTION).render(&mut text)?;
    let words = name.strip_prefix(NAME).unwrap_or(name).trim_start();
    if let Some(page) = PAGES.iter().find(|page| page.command == words) {
        more(page).to_writer(&mut text)?;
    }
    fs::write(directory.join(format!("{title}.{SECTION}")), text)?;
    let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(visible)
        .try_for_each(|sub| page(sub, directory, &format!("{name} {}", sub.get_name())))
}

/// Formats the sections that clap knows nothing of.
fn more(page: &Page) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["ENVIRONMENT"]);
    for (name, effect) in ENVIRONMENT {
        roff.control("TP", []).text([bold(name)]).text([roman(effect)]);
    }
    roff.control("SH", ["FILES"]);
    for (name, content) in page.files {
        roff.control("TP", []).text([italic(*name)]).text([roman(*content)]);
    }
    roff.control("SH", ["EXAMPLES"]);
    for (purpose, line) in page.examples {
        roff.control("PP", []).text([roman(format!("{purpose}:"))]);
        roff.control("PP", []).control("RS", ["4"]).text([bold(*line)]).control("RE", []);
    }
    roff.control("SH", ["SEE ALSO"]).text([roman(page.see_also.join(", "))]);
    roff.control("PP", []).text([roman("/usr/share/doc/mercury/docs/previrtualization.md")]);
    roff
}

/// Writes the completions for bash, zsh and fish.
///
/// # Errors
/// A file cannot be written.
pub fn completions(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Cli::command(), NAME, directory)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_completions_for_all_that_is_visible() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        completions(directory.path()).unwrap();
        let mut names: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "_afterburner",
                "afterburner-list.1",
                "afterburner-make.1",
                "afterburner-verify.1",
                "afterburner.1",
                "afterburner.bash",
                "afterburner.fish"
            ]
        );
        let page = fs::read_to_string(directory.path().join("afterburner-verify.1")).unwrap();
        assert!(page.contains("accounted for"));
        for name in names.iter().filter(|name| name.ends_with(".1")) {
            let page = fs::read_to_string(directory.path().join(name)).unwrap();
            for heading in ["ENVIRONMENT", "FILES", "EXAMPLES", "\"SEE ALSO\""] {
                assert!(page.contains(&format!(".SH {heading}")), "{name} lacks {heading}");
            }
        }
    }

    /// The command lines of the pages are ones that the command understands.
    #[test]
    fn examples_can_be_typed() {
        use clap::Parser;
        let lines = PAGES.iter().flat_map(|page| page.examples).map(|(_, line)| *line);
        for line in lines.filter(|line| line.starts_with(NAME)) {
            let words = line.split(['|', '>']).next().into_iter().flat_map(str::split_whitespace);
            Cli::try_parse_from(words).map_err(|error| error.to_string()).unwrap();
        }
    }
}
