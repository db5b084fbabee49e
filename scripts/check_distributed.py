from rl.tools.commands.check_distributed import main

raise SystemExit(main())
