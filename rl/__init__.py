"""RL for vision-language models that write the edit while a frozen generator draws it."""

import sys

if not (3, 11, 4) <= sys.version_info[:3] < (3, 14):  # no f-string: any Python gets this far
    found = sys.version.split()[0] + " (" + sys.executable + ")"
    sys.exit("rl needs Python 3.11.4 to 3.13; this is " + found + ". Start it with one of those.")

from rl.ranks import package_fixes

package_fixes.install()
