//! Manual pages and shell completions, from the definition of the command line.

use crate::{args::Cli, exit};
use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};
use std::{fs, io, path::Path};

/// Section of the manual: system administration.
const SECTION: &str = "8";

/// Writes a page for the command and one for each of its visible subcommands.
pub fn man(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = Cli::command();
    command.build();
    page(&command, directory, "mercury")
}

fn page(command: &Command, directory: &Path, name: &str) -> io::Result<()> {
    let title = name.replace(' ', "-");
    let named = command.clone().name(title.clone()).bin_name(name).after_help(exit::TABLE);
    let mut text = Vec::new();
    clap_mangen::Man::new(named).title(title.to_uppercase()).section(SECTION).render(&mut text)?;
    fs::write(directory.join(format!("{title}.{SECTION}")), text)?;
    let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(visible)
        .try_for_each(|sub| page(sub, directory, &format!("{name} {}", sub.get_name())))
}

/// Writes the completions of the shells that people use.
pub fn completions(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Cli::command(), "mercury", directory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_for_all_commands() {
        let directory = tempfile::tempdir().expect("temporary directory");
        man(directory.path()).expect("pages");
        for name in ["mercury", "mercury-attach", "mercury-doctor", "mercury-bench-switch"] {
            let text = fs::read_to_string(directory.path().join(format!("{name}.8"))).expect(name);
            assert!(text.contains("not possible on this machine"), "{name}");
        }
        assert!(!directory.path().join("mercury-fault.8").exists());
    }

    #[test]
    fn completions_for_three_shells() {
        let directory = tempfile::tempdir().expect("temporary directory");
        completions(directory.path()).expect("completions");
        assert_eq!(fs::read_dir(directory.path()).expect("directory").count(), 3);
    }
}
