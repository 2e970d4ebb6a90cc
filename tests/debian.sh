#!/usr/bin/env bash
# Installs what some tests find on Debian, as root: real texts in three languages, and a Slurm cluster of one machine.
set -euo pipefail
apt-get update --quiet
apt-get install -o DPkg::Lock::Timeout=300 --yes --quiet --no-install-recommends \
  debian-handbook manpages-de manpages-es doc-debian fortunes-es slurm-wlm munge
